"""The program with the folded weights, and its division: what is computed once, and what remains.

A folded node computes the new weight and the offset from the old weight and the vectors of its
chain, and another one is the convolution with the new weight, plus the offset. Everything that
depends on the variables alone is then computed once. What the rest of the program reads of it are
the new variables.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core

from jax_bnar._base import jax_compat
from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fold.chain import Chain, follow
from jax_bnar._fold.producers import WeightedSum, weighted_sum
from jax_bnar._fuse.dtypes import holds, is_real
from jax_bnar._fuse.failures import PlaceOfError
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Operand, Value, evaluate, values_of
from jax_bnar._fuse.rewrite import Rewrite
from jax_bnar._fuse.sizes import is_at_least


@dataclasses.dataclass(frozen=True)
class Fold:
    """A weighted sum with the BatchNorm that was folded into it."""

    sum: WeightedSum
    chain: Chain


class Network:
    """A function of variables and inputs, in which each BatchNorm that can be is folded.

    Attributes:
        graph: the program before that.
        given: the values that follow from the variables alone.
        folds: what is folded.
        left: the positions in the program of the sums that are not folded, whatever follows.
        out_of_range: those of the sums whose weights have turned out, in `fold`, not to fit in
            their dtype with the factor in them.
    """

    def __init__(self, jaxpr: Any, num_given: int, left: frozenset[int] = frozenset()) -> None:
        """The first `num_given` inputs of the jaxpr, its constants included, are the variables."""
        self.left = left
        self.out_of_range: set[int] = set()
        self.graph = Graph(jaxpr)
        self._variables = self.graph.inputs[:num_given]
        self._inputs = self.graph.inputs[num_given:]
        self.given = given_values(self.graph, self._variables)
        self.folds: list[Fold] = []
        rewrite = Rewrite(self.graph)
        for node in self.graph.nodes:
            found = weighted_sum(node, self.given)
            if found is None or node.order in left:
                continue
            chain = follow(self.graph, found.result, found.channels, self.given)
            if not chain.normalises or (chain.axis is None and len(found.channels) != 1):
                continue
            once, each = _nodes(found, chain, functools.partial(self.out_of_range.add, node.order))
            if rewrite.add(once) and rewrite.add(each):
                self.given.update(once.outputs)
                self.folds.append(Fold(found, chain))
        self._once, self._each, self._boundary = self._divided(rewrite.nodes())

    @property
    def variables(self) -> list[Any]:
        """Shapes and dtypes of the new variables."""
        return [value.aval for value in self._boundary]

    @property
    def recipe(self) -> list[str]:
        """How the new variables are computed from the old ones, as lines that can be compared."""
        names = {value: f"variable {i}" for i, value in enumerate(self._variables)}
        lines = []
        for node in self._once:
            operands = ", ".join(_name_of(operand, names) for operand in node.operands)
            # Functions among the parameters are others in each trace.
            params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(node.params.items())))
            names.update((output, f"{len(lines)}.{i}") for i, output in enumerate(node.outputs))
            lines.append(f"{node.name} {params} of {operands}")
        return [*lines, *(names[value] for value in self._boundary)]

    @property
    def constants(self) -> list[Any]:
        """The arrays within what `recipe` describes, which it does not show."""
        return [array for node in self._once for array in _constants_of(node.params.values())]

    def fold(self, arrays: Sequence[Any]) -> list[Any]:
        """The new variables, from the old ones."""
        return _evaluated(self._once, self._variables, self._boundary, arrays)

    def run(self, variables: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The results of the program, from the new variables and the other inputs."""
        return _evaluated(
            self._each,
            [*self._boundary, *self._inputs],
            self.graph.outputs,
            [*variables, *inputs],
        )

    def _divided(self, nodes: Sequence[Node]) -> tuple[list[Node], list[Node], list[Value]]:
        """The nodes that run once, those that run each time, and what the latter read."""
        # What repeats fewer numbers is better computed each time from these. Arrays of the size of
        # the batch among the variables would also tie them to that size.
        contents = _contents(self._variables, (node for node in nodes if not node.has_effects))
        boundary: dict[Value, None] = {}
        each: list[Node] = []
        wanted: set[Value] = set()

        def want(operands: Iterable[Operand]) -> None:
            for value in values_of(operands):
                if value in self.given and contents[value] == math.prod(value.shape):
                    boundary[value] = None
                else:
                    wanted.add(value)

        want(self.graph.outputs)
        for node in reversed(nodes):
            if node.has_effects or any(value in wanted for value in node.outputs):
                each.append(node)
                want(node.operands)
        needed = set(boundary)
        once: list[Node] = []
        for node in reversed(nodes):
            if any(value in needed for value in node.outputs):
                once.append(node)
                needed.update(values_of(node.operands))
        return once[::-1], each[::-1], list(boundary)


def _evaluated(*program: Any) -> list[Any]:
    """`evaluate`, which raises what the program raises."""
    try:
        return evaluate(*program)
    except PlaceOfError as place:
        raise place.error from None


def _constants_of(params: Iterable[Any]) -> Iterator[Any]:
    """The arrays in the closed jaxprs among the parameters of an equation."""
    for param in params:
        if isinstance(param, (tuple, list)):
            yield from _constants_of(param)
        elif isinstance(param, (core.ClosedJaxpr, core.Jaxpr)):
            yield from getattr(param, "consts", ())
            for equation in jax_compat.open_jaxpr(param).eqns:
                yield from _constants_of(equation.params.values())


def _name_of(operand: Operand, names: dict[Value, str]) -> str:
    if isinstance(operand, Value):
        return names[operand]
    return f"{operand.value!r} of {operand.aval}"


def given_values(graph: Graph, variables: Sequence[Value]) -> set[Value]:
    """The values that are computed from the variables and from literals."""
    given = set(variables)
    for node in graph.nodes:
        if not node.has_effects and all(value in given for value in values_of(node.operands)):
            given.update(node.outputs)
    return given


def _contents(variables: Sequence[Value], nodes: Iterable[Node]) -> dict[Value, int]:
    """For each value, at most how many numbers determine it: fewer than it has, if it repeats."""
    contents = {value: math.prod(value.shape) for value in variables}
    for node in nodes:
        behind = sum(contents.get(value, 0) for value in values_of(node.operands))
        for value in node.outputs:
            size = math.prod(value.shape)
            contents[value] = behind if is_at_least(size, behind) else size
    return contents


def _nodes(found: WeightedSum, chain: Chain, leaves_range: Callable[[], None]) -> tuple[Node, Node]:
    """The node that computes weight and offset, and the one that computes the end of the chain.

    The former calls `leaves_range` if the dtype of the weight does not hold it, or a factor is
    infinite or NaN.
    """
    weight = found.node.operands[found.weight]
    axis = chain.axis if chain.axis is not None else next(iter(found.channels))
    channels = found.result.shape[axis]
    dtype = accumulation_dtype(found.result.dtype)
    new_weight = Value(weight.aval)
    offset = Value(ShapedArray((channels,), dtype))
    steps = [(step.name, step.is_first, step.axis) for step in chain.steps]
    once = Node(
        "fold",
        {"steps": steps, "axis": axis, "channels": found.channels},
        [_before_rounding(weight), *chain.vectors],
        [new_weight, offset],
        found.node.equation,
        found.node.name_stack,
        functools.partial(
            _folded, chain, weight, found.channels[axis], channels, dtype, leaves_range
        ),
    )
    producer = chain.end.producer
    assert producer is not None
    each = Node(
        "folded",
        {},
        [found.array, new_weight, offset],
        [chain.end],
        producer.equation,
        found.node.name_stack,
        functools.partial(_applied, found, chain, axis),
    )
    new_weight.producer = offset.producer = once
    return once, each


def _before_rounding(weight: Operand) -> Operand:
    """The weight in the widest dtype that the program has it in, so that it is rounded once.

    A weight that is rounded and widened again, or rounded to 8 bits, is rounded on purpose.
    """
    while isinstance(weight, Value) and (node := weight.producer) is not None:
        inner = node.inputs[0] if node.inputs else weight
        if node.name != "convert_element_type" or not is_real(inner.dtype):
            break
        if not is_real(weight.dtype) or not holds(inner.dtype, weight.dtype):
            break
        weight = inner
    return weight


def _folded(
    chain: Chain,
    weight: Operand,
    axis: int,
    channels: int,
    dtype: Any,
    leaves_range: Callable[[], None],
    given: Any,
    *vectors: Any,
) -> list[jax.Array]:
    factor, offset = chain.affine(vectors, dtype)
    shape = [1] * len(weight.shape)
    shape[axis] = channels if factor.ndim else 1
    folded = jnp.asarray(given, dtype) * factor.reshape(shape)
    rounded = folded.astype(weight.dtype)
    if not isinstance(rounded, jax.core.Tracer) and not _is_held(factor, folded, rounded):
        leaves_range()
    return [rounded, jnp.broadcast_to(offset, (channels,))]


def _is_held(factor: jax.Array, folded: jax.Array, rounded: jax.Array) -> bool:
    """Whether a folded weight is within the range of its dtype."""
    # In the kernel, an infinite factor would meet the zeros of x one by one: 0 * inf is NaN.
    if not jnp.isfinite(factor).all():
        return False
    if rounded.dtype != jnp.float16:
        return True  # The other dtypes have the range of the accumulation dtype.
    error = jnp.linalg.norm((folded - rounded.astype(folded.dtype)).ravel())
    # Without overflow and underflow, it is below 2^-11 of the norm.
    return bool(error <= 2**-9 * jnp.linalg.norm(folded.ravel()))


def _applied(
    found: WeightedSum, chain: Chain, axis: int, array: Any, weight: Any, offset: Any
) -> list[jax.Array]:
    operands = (array, weight) if found.weight == 1 else (weight, array)
    (result,) = found.node.run(*operands)
    shape = [1] * result.ndim
    shape[axis] = result.shape[axis]
    result = result.astype(offset.dtype) + offset.reshape(shape)
    for move in chain.moves:
        (result,) = move.run(result)
    return [result.astype(chain.end.dtype)]
