"""What follows a weighted sum and multiplies or shifts its channels: a BatchNorm in evaluation.

The operations need not be those of any library: as long as the value is `factor * sum + offset`
with given vectors along one axis, each operation changes the factor and the offset, and the next
one follows.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Operand, Value, is_reshape_of_ones, source
from jax_bnar._fuse.sizes import is_long, of_each_symbol_one

# A primitive, whether what the chain computes is its first operand, and `Step.part`.
Operation = tuple[str, bool, tuple[int, int] | None]

# The primitives of which a chain may consist, beside conversions: those that change factor or
# offset, and those that may do no more than move elements.
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}
_FACTORS = ("mul", "div")
MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on factor and offset.

    Attributes:
        name: the primitive.
        is_first: whether what the chain computes is its first operand.
        vector: the array of the program that it reads.
        multiplies: whether it multiplies channels by a vector that is no literal.
        axis: the axis of the start along which the vector runs; None if it is a number.
        part: where in the vector the channels of the start begin and end; None if it has no others.
    """

    name: str
    is_first: bool
    vector: Operand
    multiplies: bool
    axis: int | None
    part: tuple[int, int] | None = None


@dataclasses.dataclass
class Chain:
    """Operations from `start` to `end` on one array, where nothing else reads what is between.

    Attributes:
        start: the result of the weighted sum.
        end: what is computed.
        reached: the value behind conversions and moves after that, whose reader ends the chain.
        steps: what changes factor and offset.
        moves: the nodes that only move elements: transpositions, axes of size 1, and reshapes of
            the other axes.
        further: those of them behind `end`.
        origins: the axis of `start` from which each axis of `reached` comes.
    """

    start: Value
    end: Value
    reached: Value
    steps: list[Step] = dataclasses.field(default_factory=list)
    moves: list[Node] = dataclasses.field(default_factory=list)
    further: list[Node] = dataclasses.field(default_factory=list)
    origins: list[int | None] = dataclasses.field(default_factory=list)

    @property
    def normalises(self) -> bool:
        """Whether it multiplies channels, as a BatchNorm does and a bias does not."""
        return any(step.multiplies for step in self.steps)

    @property
    def axis(self) -> int | None:
        """The axis of `start` along which its vectors run; None if there are only numbers."""
        return next((step.axis for step in self.steps if step.axis is not None), None)

    @property
    def vectors(self) -> list[Operand]:
        """The arrays that the operations read."""
        return [step.vector for step in self.steps]

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple((step.name, step.is_first, step.part) for step in self.steps)

    def finish(self, result: jax.Array) -> list[jax.Array]:
        """`end`, from an array with the axes of `start` that has factor and offset in it."""
        for move in self.moves:
            (result,) = move.run(result)
        return [result.astype(self.end.dtype)]


def affine(
    operations: Sequence[Operation], vectors: Sequence[Any], dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Factor and offset of a chain, each a number or an array with an element for each channel."""
    factor, offset = jnp.ones((), dtype), jnp.zeros((), dtype)
    for (name, is_first, part), given in zip(operations, vectors, strict=True):
        vector = jnp.asarray(given, dtype).reshape(() if np.size(given) == 1 else -1)
        if part is not None:
            vector = vector[slice(*part)]
        function = ARITHMETIC[name]
        if name in _FACTORS:
            factor, offset = function(factor, vector), function(offset, vector)
        elif is_first or name == "add":
            offset = function(offset, vector)
        else:
            factor, offset = -factor, vector - offset
    return factor, offset


def follow(graph: Graph, start: Value, axes: Collection[int], given: Collection[Value]) -> Chain:
    """The longest chain from `start` whose vectors are given and run along one of these axes.

    It ends with the last operation that changes factor or offset.
    """
    chain = Chain(start, start, start, origins=list(range(len(start.shape))))
    while (node := graph.sole_reader(chain.reached)) is not None:
        if len(node.outputs) != 1 or not is_real(node.outputs[0].dtype):
            break
        if node.name == "convert_element_type":
            pass
        elif (moved := _moved(node, chain.origins)) is not None:
            chain.further.append(node)
            chain.origins = moved
        else:
            step = _step(node, chain.reached, chain.origins)
            if step is None or (isinstance(step.vector, Value) and step.vector not in given):
                break
            if step.axis is not None and (
                step.axis not in axes or chain.axis not in (None, step.axis)
            ):
                break
            chain.steps.append(step)
            chain.end = node.outputs[0]
            chain.moves, chain.further = chain.moves + chain.further, []
        chain.reached = node.outputs[0]
    return chain


def _moved(node: Node, origins: Sequence[int | None]) -> list[int | None] | None:
    """The origins of the axes of the node's result, if it only moves elements."""
    if node.name == "transpose":
        return [origins[axis] for axis in node.params["permutation"]]
    if node.name not in MOVES:
        return None
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if len(node.inputs) != 1:
        return None
    if is_reshape_of_ones(before, after):
        long = iter([o for o, size in zip(origins, before, strict=True) if is_long(size)])
        return [next(long) if is_long(size) else None for size in after]
    if node.name != "reshape" or of_each_symbol_one(before) == 0:
        return None
    # An axis stays where those before it have as many elements as before, and it has its length.
    stays = {place: o for place, o in zip(_places(before), origins, strict=True) if place}
    return [stays.get(place) if place else None for place in _places(after)]


def _places(shape: Sequence[Any]) -> list[tuple[Any, Any] | None]:
    """For each axis, how many elements the axes before it have, and its length; None if it is 1."""
    before = itertools.accumulate(shape, operator.mul, initial=1)
    return [(b, size) if is_long(size) else None for b, size in zip(before, shape, strict=False)]


def _step(node: Node, value: Value, origins: Sequence[int | None]) -> Step | None:
    """The step of an addition, a subtraction, a product or a quotient with a vector."""
    if node.name not in ARITHMETIC or len(node.inputs) != 2:
        return None
    # An operand with longer axes makes the result larger than the sum.
    if node.outputs[0].shape != value.shape:
        return None
    is_first = node.inputs[0] is value
    other = node.inputs[1 if is_first else 0]
    if other is value or (node.name == "div" and not is_first):
        return None
    vector, places = source(other)
    varying = {origins[i] for i, place in enumerate(places) if place is not None}
    if len(varying) > 1 or None in varying:
        return None
    if sum(is_long(size) for size in vector.shape) != len(varying):
        return None
    multiplies = node.name in _FACTORS and isinstance(vector, Value)
    return Step(node.name, is_first, vector, multiplies, next(iter(varying), None))
