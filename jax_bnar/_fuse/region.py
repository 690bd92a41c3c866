"""What a program computes from one array x, as polynomials in x, its moments and vectors.

`Region` walks forward from x. Every value that it understands gets a `Term`: a polynomial, and for
each axis of the value the axes of x that it runs along. Two spellings of the normalisation are the
same function exactly if their polynomials are equal, so no spelling has to be listed. A value that
it does not understand stays as it is in the program, and nothing is concluded from it.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.export import is_symbolic_dim

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fuse import axes as axes_of
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
from jax_bnar._fuse.unknowns import Clamped, Foreign, ReciprocalRoot, Unknowns, X


@dataclasses.dataclass(frozen=True)
class Term:
    """A value of the region: one polynomial, or several that are stacked along an axis."""

    polynomials: tuple[Polynomial, ...]
    labels: Labels

    @property
    def polynomial(self) -> Polynomial | None:
        return self.polynomials[0] if len(self.polynomials) == 1 else None


class Region:
    """All values that are computed from x and understood.

    Attributes:
        x: the array at which it begins.
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
        self.graph = graph
        self.axis_sizes = axis_sizes
        labels = axes_of.own(x.shape)
        mapped = frozenset(axis_sizes)
        self.unknowns = Unknowns(mapped.union(*labels))
        self.x_number = self.unknowns.number(X())
        self.terms: dict[Value, Term] = {x: Term((Polynomial.unknown(self.x_number),), labels)}
        self.tolerance = 2.0 * float(np.finfo(accumulation_dtype(x.dtype)).eps)
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
        if node.name in ("psum", "psum_invariant"):
            rule = self._psum
            pairs = [
                (output, rule(node, self.terms[operand]))
                for output, operand in zip(node.outputs, node.inputs, strict=True)
                if operand in self.terms
            ]
            return [(output, term) for output, term in pairs if term is not None]
        rule = _RULES.get(node.name)
        term = None if rule is None else rule(self, node)
        return [] if term is None else [(node.outputs[0], term)]

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
        terms = [self._operand(operand, labels) for operand in node.inputs]
        return None if any(t is None for t in terms) else terms  # type: ignore[return-value]

    def _operand(self, operand: Operand, labels: Labels) -> Term | None:
        if isinstance(operand, Value) and operand in self.terms:
            return dataclasses.replace(self.terms[operand], labels=labels)
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
        widest = accumulation_dtype(self.x.dtype)
        return is_real(dtype) and holds(dtype, self.x.dtype) and holds(widest, dtype)

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
        if any(name not in self.axis_sizes for name in names):
            return None
        sizes = [*(shape[d] for d in dims), *(self.axis_sizes[name] for name in names)]
        count = self.unknowns.size(math.prod(sizes))
        means = [expectation(p, over, self.unknowns) for p in term.polynomials]
        if any(mean is None for mean in means):
            return None
        labels = tuple(label for d, label in enumerate(term.labels) if d not in set(dims))
        return Term(tuple(m * count for m in means if m is not None), labels)

    def _psum(self, node: Node, term: Term) -> Term | None:
        if node.params.get("axis_index_groups") is not None:
            return None
        axes = node.params["axes"]
        dims = [axis for axis in axes if isinstance(axis, int)]
        names = [axis for axis in axes if not isinstance(axis, int)]
        return self.mean_over(term, node.inputs[0].shape, dims, names)


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
    """Several statistics stacked in one array, as Flax packs them for one psum."""
    axis = int(node.params["axis"] if node.name == "stack" else node.params["dimension"])
    terms = [region.terms.get(operand) for operand in node.inputs]  # type: ignore[arg-type]
    if any(term is None or term.polynomial is None for term in terms):
        return None
    known = [term for term in terms if term is not None]
    first = known[0].labels
    if any(term.labels != first for term in known):
        return None
    if node.name == "stack":
        labels = (*first[:axis], (STACK,), *first[axis:])
    elif all(operand.shape[axis] == 1 for operand in node.inputs):
        labels = (*first[:axis], (STACK,), *first[axis + 1 :])
    else:
        return None
    return Term(tuple(p for term in known for p in term.polynomials), labels)


def _slice(region: Region, node: Node) -> Term | None:
    """One of several stacked statistics."""
    labels = region.labels(node)
    if labels is None or (STACK,) not in labels or node.params["strides"] is not None:
        return None
    stacked = labels.index((STACK,))
    starts, limits = node.params["start_indices"], node.params["limit_indices"]
    for dim, size in enumerate(node.inputs[0].shape):
        whole = (starts[dim], limits[dim]) == (0, size)
        if not whole and (dim != stacked or limits[dim] - starts[dim] != 1):
            return None
    if limits[stacked] - starts[stacked] != 1:
        return None
    term = region.terms[node.inputs[0]]  # type: ignore[index]
    return Term(
        (term.polynomials[starts[stacked]],),
        tuple(() if dim == stacked else label for dim, label in enumerate(labels)),
    )


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
    "concatenate": _stack,
    "slice": _slice,
}
