"""What a program computes from one array x, as polynomials in x, its moments and vectors.

`Region` walks forward from x. Every value that it understands gets a `Term`: a polynomial, and for
each axis of the value the axes of x that it runs along. Spellings of the normalisation with equal
polynomials are the same function, so no spelling has to be listed. Literals are rounded before a
program has them, so a factor within two epsilons of 1 or 2 counts as that (`polynomial.py`). A
value that it does not understand stays as it is in the program, and nothing is concluded from it.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.export import is_symbolic_dim

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fuse import axes as axes_of
from jax_bnar._fuse import named_axes, stacks
from jax_bnar._fuse.axes import STACK, Labels
from jax_bnar._fuse.dtypes import holds, is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.moments import expectation
from jax_bnar._fuse.nodes import (
    Constant,
    Node,
    Operand,
    Value,
    source,
)
from jax_bnar._fuse.polynomial import Polynomial
from jax_bnar._fuse.sizes import is_long
from jax_bnar._fuse.term import Term
from jax_bnar._fuse.unknowns import Clamped, Foreign, ReciprocalRoot, Unknowns, X
from jax_bnar._fuse.widened import stored_array


class Region:
    """All values that are computed from x and understood.

    Attributes:
        x: the array at which it begins.
        stored: the array of which x is a wider copy in another shape, or else x itself.
        terms: the term of each value that is understood, in the order of the program.
        unknowns: the unknowns of the polynomials.
        shift: what the program adds to x before it takes the statistics, such as the bias of a
            convolution; 0 if it adds nothing.
    """

    def __init__(
        self,
        graph: Graph,
        x: Value,
        axis_sizes: Mapping[Any, int],
        shifted: Value | None = None,
    ) -> None:
        self.x = x
        self.stored = stored_array(x)
        self.graph = graph
        self.axis_sizes = axis_sizes
        labels = axes_of.own(x.shape)
        mapped = frozenset(axis_sizes)
        self.unknowns = Unknowns(mapped.union(*labels))
        self.x_number = self.unknowns.number(X())
        self.terms: dict[Value, Term] = {x: Term((Polynomial.unknown(self.x_number),), labels)}
        self.accumulation = accumulation_dtype(x.dtype)
        self.tolerance = 2.0 * float(np.finfo(self.accumulation).eps)
        self._walk()
        self.shift = Polynomial.constant(0)
        if shifted is not None and (term := self.terms.get(shifted)) and term.polynomial:
            self.shift = term.polynomial - Polynomial.unknown(self.x_number)

    def degree(self, value: Value) -> int | None:
        """The highest power of x in a value, or None if it is not in the region."""
        term = self.terms.get(value)
        if term is None:
            return None
        return max(
            (max(polynomial.by_power_of(self.x_number), default=0))
            for polynomial in term.polynomials
        )

    def _walk(self) -> None:
        waiting = [(node.order, node) for node in self.graph.readers(self.x)]
        heapq.heapify(waiting)
        seen = {order for order, _ in waiting}
        while waiting:
            _, node = heapq.heappop(waiting)
            for value, term in self._understand(node):
                if any(polynomial.is_unwieldy for polynomial in term.polynomials):
                    continue
                self.terms[value] = term
                for reader in self.graph.readers(value):
                    if reader.order not in seen:
                        seen.add(reader.order)
                        heapq.heappush(waiting, (reader.order, reader))

    def _understand(self, node: Node) -> list[tuple[Value, Term]]:
        if (rule_of_many := _RULES_OF_MANY.get(node.name)) is not None:
            terms = rule_of_many(self, node)
        else:
            rule = _RULES.get(node.name)
            terms = [] if rule is None else [rule(self, node)]
        pairs = zip(node.outputs, terms, strict=False)
        return [(output, term) for output, term in pairs if term is not None]

    # Operands

    def operands(self, node: Node) -> list[Term] | None:
        """The terms of an elementwise node's operands, including those outside the region."""
        shape = node.outputs[0].shape
        labels = axes_of.merged(
            shape,
            [
                (o.shape, self.terms[o].labels)
                for o in node.inputs
                if isinstance(o, Value) and o in self.terms
            ],
        )
        if labels is None:
            return None
        terms = [self.operand(operand, labels) for operand in node.inputs]
        return None if any(t is None for t in terms) else terms  # type: ignore[return-value]

    def operand(self, operand: Operand, labels: Labels) -> Term | None:
        if isinstance(operand, Value) and operand in self.terms:
            term = dataclasses.replace(self.terms[operand], labels=labels)
            return None if stacks.is_ambiguous(term) else term
        origin, axes = source(operand)
        if isinstance(origin, Constant):
            number = self._number(origin)
            return None if number is None else Term((number,), labels)
        found: list[int | None] = [None] * len(origin.shape)
        for axis, label in zip(axes, labels[-len(axes) :] if axes else (), strict=True):
            if axis is None:
                continue
            if len(label) != 1 or label == (STACK,):
                return None
            found[axis] = label[0]
        if any(is_long(n) and axis is None for n, axis in zip(origin.shape, found, strict=True)):
            return None
        return Term((self.unknowns.polynomial(Foreign(origin, tuple(found))),), labels)

    def _number(self, constant: Constant) -> Polynomial | None:
        if is_symbolic_dim(constant.value):
            return self.unknowns.size(constant.value)
        value = np.asarray(constant.value)
        if value.shape != () or value.dtype.kind == "c" or not np.isfinite(float(value)):
            return None
        return Polynomial.constant(Fraction(float(value)))

    # Rules

    def elementwise(self, node: Node, function: Callable[..., Polynomial | None]) -> Term | None:
        terms = self.operands(node)
        if terms is None or not self._keeps_precision(node.outputs[0].dtype):
            return None
        count = max(len(term.polynomials) for term in terms)
        columns = [
            term.polynomials * (count if len(term.polynomials) == 1 else 1) for term in terms
        ]
        if any(len(column) != count for column in columns):
            return None
        results = [function(*row) for row in zip(*columns, strict=True)]
        if any(result is None for result in results):
            return None
        rounded = tuple(r.rounded(self.tolerance) for r in results if r is not None)
        return Term(rounded, terms[0].labels)

    def _keeps_precision(self, dtype: Any) -> bool:
        """Whether a dtype is no narrower than x and no wider than the accumulation dtype.

        A program that computes in a narrower dtype rounds on purpose.
        """
        return (
            is_real(dtype) and holds(dtype, self.stored.dtype) and holds(self.accumulation, dtype)
        )

    def reciprocal_root(self, polynomial: Polynomial, power: int) -> Polynomial | None:
        if self.x_number in polynomial.unknowns:
            return None
        return self.unknowns.polynomial(ReciprocalRoot(polynomial), power)

    def clamped(self, left: Polynomial, right: Polynomial) -> Polynomial | None:
        """max(floor, a), written as floor + max(0, a - floor)."""
        for floor, other in ((left, right), (right, left)):
            if floor.as_constant is not None and self.x_number not in other.unknowns:
                return floor + self.unknowns.polynomial(Clamped(other - floor))
        return None

    def convert(self, node: Node) -> Term | None:
        return self.elementwise(node, lambda polynomial: polynomial)

    def moved(self, node: Node, labels: Labels | None) -> Term | None:
        """The same polynomials along other axes."""
        term = self.terms.get(node.inputs[0])  # type: ignore[arg-type]
        if term is None or labels is None:
            return None
        return dataclasses.replace(term, labels=labels)

    def labels(self, node: Node) -> Labels | None:
        term = self.terms.get(node.inputs[0])  # type: ignore[arg-type]
        return None if term is None else term.labels

    def sizes(self, node: Node) -> dict[Any, int]:
        """The sizes of the axes that a label can name."""
        term = self.terms[node.inputs[0]]  # type: ignore[index]
        return {**dict(enumerate(self.x.shape)), STACK: len(term.polynomials)}

    def mean_over(
        self, term: Term, shape: Sequence[int], dims: Sequence[int], names: Sequence[Any]
    ) -> Term | None:
        """The sum over axes of the array and over mapped axes: the mean times the count."""
        over = frozenset(names).union(*(term.labels[d] for d in dims))
        if STACK in over:
            return None
        mapped = [named_axes.size_of(name, self.axis_sizes) for name in names]
        sizes = [*(shape[d] for d in dims), *mapped]
        count = self.unknowns.size(math.prod(sizes))
        means = [expectation(p, over, self.unknowns) for p in term.polynomials]
        if any(mean is None for mean in means):
            return None
        labels = tuple(label for d, label in enumerate(term.labels) if d not in set(dims))
        return Term(tuple(m * count for m in means if m is not None), labels)


def _elementwise(
    function: Callable[..., Polynomial | None],
) -> Callable[[Region, Node], Term | None]:
    return lambda region, node: region.elementwise(
        node, lambda *polynomials: function(region, node, *polynomials)
    )


def _quotient(left: Polynomial, right: Polynomial) -> Polynomial | None:
    inverse = right.inverse()
    return None if inverse is None else left * inverse


def _integer_power(base: Polynomial, exponent: int) -> Polynomial | None:
    if exponent < 0:
        inverse = base.inverse()
        return None if inverse is None else _integer_power(inverse, -exponent)
    if exponent > 2:
        return None
    result = Polynomial.constant(1)
    for _ in range(exponent):
        result = result * base
    return result


def _power(region: Region, base: Polynomial, exponent: Polynomial) -> Polynomial | None:
    value = exponent.as_constant
    if value == Fraction(1, 2):
        return region.reciprocal_root(base, -1)
    if value == Fraction(-1, 2):
        return region.reciprocal_root(base, 1)
    if value is not None and value.denominator == 1:
        return _integer_power(base, int(value))
    return None


def _reduce_sum(region: Region, node: Node) -> Term | None:
    operand = node.inputs[0]
    term = region.terms.get(operand)  # type: ignore[arg-type]
    if term is None:
        return None
    return region.mean_over(term, operand.shape, [int(a) for a in node.params["axes"]], ())


def _reshape(region: Region, node: Node) -> Term | None:
    labels = region.labels(node)
    if labels is None:
        return None
    before, after = node.inputs[0].shape, node.outputs[0].shape
    return region.moved(node, axes_of.reshaped(before, labels, after, region.sizes(node)))


def _broadcast(region: Region, node: Node) -> Term | None:
    labels = region.labels(node)
    if labels is None or len(node.inputs) > 1:
        return None
    result: list[tuple[Any, ...]] = [()] * len(node.outputs[0].shape)
    for dim, label in zip(node.params["broadcast_dimensions"], labels, strict=True):
        result[int(dim)] = label
    return region.moved(node, tuple(result))


def _transpose(region: Region, node: Node) -> Term | None:
    labels = region.labels(node)
    if labels is None:
        return None
    return region.moved(node, tuple(labels[int(d)] for d in node.params["permutation"]))


def _stack(region: Region, node: Node) -> Term | None:
    terms = _alike(region, node)
    return None if terms is None else stacks.stacked(terms, int(node.params["axis"]))


def _concatenate(region: Region, node: Node) -> Term | None:
    terms, axis = _alike(region, node), int(node.params["dimension"])
    if terms is None:
        return None
    return stacks.concatenated(terms, axis, [operand.shape[axis] for operand in node.inputs])


def _alike(region: Region, node: Node) -> list[Term] | None:
    """The terms of a node's operands, those outside the region with the labels of those inside."""
    known = [region.terms[o] for o in node.inputs if isinstance(o, Value) and o in region.terms]
    terms = [
        region.terms[o]
        if isinstance(o, Value) and o in region.terms
        else region.operand(o, known[0].labels)
        for o in node.inputs
    ]
    return None if any(term is None for term in terms) else terms  # type: ignore[return-value]


def _slice(region: Region, node: Node) -> Term | None:
    """Some of several stacked statistics."""
    operand, strides = node.inputs[0], node.params["strides"]
    if strides is not None and any(stride != 1 for stride in strides):
        return None
    term: Term | None = region.terms[operand]  # type: ignore[index]
    sizes = region.sizes(node)
    bounds = zip(node.params["start_indices"], node.params["limit_indices"], strict=True)
    for axis, (start, limit) in enumerate(bounds):
        if term is not None and (start, limit) != (0, operand.shape[axis]):
            term = stacks.part(term, axis, start, limit, sizes)
    return term


def _split(region: Region, node: Node) -> list[Term | None]:
    axis, sizes = int(node.params["axis"]), region.sizes(node)
    term: Term = region.terms[node.inputs[0]]  # type: ignore[index]
    limits = list(itertools.accumulate(node.params["sizes"]))
    starts = [0, *limits[:-1]]
    return [
        stacks.part(term, axis, start, limit, sizes)
        for start, limit in zip(starts, limits, strict=True)
    ]


def _unstack(region: Region, node: Node) -> Sequence[Term | None]:
    term: Term = region.terms[node.inputs[0]]  # type: ignore[index]
    return stacks.unstacked(term, int(node.params["axis"])) or []


def _psum(region: Region, node: Node) -> list[Term | None]:
    names = named_axes.summed_axes(node.params, region.axis_sizes)
    if names is None:
        return []
    dims = named_axes.dims_of(node.params)
    return [
        region.mean_over(region.terms[operand], operand.shape, dims, names)
        if isinstance(operand, Value) and operand in region.terms
        else None
        for operand in node.inputs
    ]


# To support another primitive, add its rule here; see README.md.
_RULES: dict[str, Callable[[Region, Node], Term | None]] = {
    "add": _elementwise(lambda region, node, a, b: a + b),
    "add_any": _elementwise(lambda region, node, a, b: a + b),
    "sub": _elementwise(lambda region, node, a, b: a - b),
    "mul": _elementwise(lambda region, node, a, b: a * b),
    "div": _elementwise(lambda region, node, a, b: _quotient(a, b)),
    "neg": _elementwise(lambda region, node, a: -a),
    "square": _elementwise(lambda region, node, a: a * a),
    "integer_pow": _elementwise(lambda region, node, a: _integer_power(a, node.params["y"])),
    "pow": _elementwise(lambda region, node, a, b: _power(region, a, b)),
    "sqrt": _elementwise(lambda region, node, a: region.reciprocal_root(a, -1)),
    "rsqrt": _elementwise(lambda region, node, a: region.reciprocal_root(a, 1)),
    "max": _elementwise(lambda region, node, a, b: region.clamped(a, b)),
    "convert_element_type": Region.convert,
    "copy": Region.convert,
    "pvary": Region.convert,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "stack": _stack,
    "concatenate": _concatenate,
    "slice": _slice,
}
# The rules of primitives with several results give a term, or None, for each of them.
_RULES_OF_MANY: dict[str, Callable[[Region, Node], Sequence[Term | None]]] = {
    "psum": _psum,
    "psum_invariant": _psum,
    "split": _split,
    "unstack": _unstack,
}
# The primitives of which a normalisation may consist.
UNDERSTOOD = frozenset([*_RULES, *_RULES_OF_MANY])
