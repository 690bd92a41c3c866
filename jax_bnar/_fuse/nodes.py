"""The values and nodes of a program's graph, and how the graph runs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jax_bnar._base import jax_compat
from jax_bnar._base.dtypes import SUPPORTED

_SUPPORTED_NAMES: Final = tuple(dtype.name for dtype in SUPPORTED)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of the program."""

    aval: Any
    producer: "Node | None" = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        return self.aval.dtype


@dataclasses.dataclass(eq=False, slots=True)
class Constant:
    """A literal of the program, or a scalar that was folded to one."""

    aval: Any
    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        return self.aval.dtype


Operand = Value | Constant


@dataclasses.dataclass(eq=False)
class Node:
    """One equation of the program, or the node with which a rewrite replaced several.

    Attributes:
        name: the name of the primitive.
        params: the parameters of the primitive.
        inputs: what it reads.
        outputs: what it defines.
        equation: the equation it comes from, which has the context and the source line.
        name_stack: that of the equation, below those of the inlined calls around it.
        run: takes the arrays of `inputs` and returns those of `outputs`.
        order: its position in the program, or -1 if a rewrite made it.
        has_effects: whether it has effects; nodes with effects keep their order.
    """

    name: str
    params: dict[str, Any]
    inputs: list[Operand]
    outputs: list[Value]
    equation: Any
    name_stack: Any
    run: Callable[..., Sequence[Any]]
    order: int = -1
    has_effects: bool = False


def source(operand: Operand) -> tuple[Operand, tuple[int | None, ...]]:
    """The array of which an operand is a broadcast, and its axis for each axis of the operand.

    None stands for an axis of size 1, or one along which the operand repeats.
    """
    axes: tuple[int | None, ...] = tuple(
        i if size > 1 else None for i, size in enumerate(operand.shape)
    )
    while isinstance(operand, Value) and (node := operand.producer) is not None:
        inner = node.inputs[0] if node.inputs else None
        if inner is None:
            break
        if node.name == "broadcast_in_dim" and len(node.inputs) == 1:
            back = {
                int(dim): i
                for i, dim in enumerate(node.params["broadcast_dimensions"])
                if inner.shape[i] > 1
            }
        elif node.name in ("reshape", "squeeze", "expand_dims"):
            if not is_reshape_of_ones(inner.shape, operand.shape):
                break
            back = dict(zip(_real_axes(operand.shape), _real_axes(inner.shape), strict=True))
        elif node.name == "convert_element_type" and operand.shape == ():
            origin, _ = source(inner)
            if not isinstance(origin, Constant):
                break
            # In shard_map, jax later than 0.10.2 first makes the literal varying, then converts it.
            return Constant(operand.aval, np.asarray(origin.value).astype(operand.dtype)), ()
        elif node.name == "pvary":
            back = {i: i for i in range(len(operand.shape))}
        else:
            break
        axes = tuple(None if axis is None else back.get(axis) for axis in axes)
        operand = inner
    return operand, axes


def _real_axes(shape: Sequence[int]) -> list[int]:
    return [i for i, size in enumerate(shape) if size > 1]


def is_reshape_of_ones(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshape only adds and removes axes of size 1."""
    return [n for n in before if n > 1] == [n for n in after if n > 1]


def array_and_vector(node: Node) -> tuple[Operand, Operand] | None:
    """The operand that is a whole array, then the one that is a vector, if there is one of each."""
    left, right = (is_broadcast(operand, node.outputs[0]) for operand in node.inputs)
    if right and not left:
        return node.inputs[0], node.inputs[1]
    if left and not right and node.name != "div":
        return node.inputs[1], node.inputs[0]
    return None


def is_broadcast(operand: Operand, result: Value) -> bool:
    if operand.shape != result.shape:
        return True
    _, axes = source(operand)
    return any(a is None and n > 1 for a, n in zip(axes, operand.shape, strict=True))


def evaluate(
    nodes: Iterable[Node], inputs: Sequence[Value], outputs: Sequence[Operand], args: Sequence[Any]
) -> list[Any]:
    """Runs the nodes on arrays or tracers, and drops each value after its last use."""
    nodes = list(nodes)
    env: dict[Value, Any] = dict(zip(inputs, args, strict=True))
    kept = {value for value in outputs if isinstance(value, Value)}
    last: dict[Value, Node] = {value: node for node in nodes for value in values_of(node.inputs)}

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else env[operand]

    def result(operand: Operand) -> Any:
        array = read(operand)
        return jnp.asarray(array, operand.dtype) if isinstance(operand, Constant) else array

    for node in nodes:
        arrays = [read(operand) for operand in node.inputs]
        with jax_compat.context_of(node.equation, node.name_stack):
            results = node.run(*arrays)
        env.update(zip(node.outputs, results, strict=True))
        for value in values_of(node.inputs):
            if last[value] is node and value not in kept:
                env.pop(value, None)
    return [result(operand) for operand in outputs]


def values_of(operands: Iterable[Operand]) -> Iterator[Value]:
    return (operand for operand in operands if isinstance(operand, Value))


def is_real(dtype: Any) -> bool:
    """Whether the operators take arrays of this dtype, which may be an extended dtype of JAX."""
    return dtype.name in _SUPPORTED_NAMES


@functools.cache
def holds(wide: Any, narrow: Any) -> bool:
    """Whether every number of the dtype `narrow` is also a number of `wide`."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp
