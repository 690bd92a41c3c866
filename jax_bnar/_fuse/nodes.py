"""The values and nodes of a program's graph, and how the graph runs."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_bnar._base import jax_compat
from jax_bnar._fuse.dtypes import converted
from jax_bnar._fuse.failures import PlaceOfError
from jax_bnar._fuse.sizes import Size, is_long


@dataclasses.dataclass(eq=False, slots=True)
class _Typed:
    aval: Any

    @property
    def shape(self) -> tuple[Size, ...]:
        return getattr(self.aval, "shape", ())  # a token of lax has none

    @property
    def dtype(self) -> Any:
        return getattr(self.aval, "dtype", None)


@dataclasses.dataclass(eq=False, slots=True)
class Value(_Typed):
    """One array of the program.

    Attributes:
        producer: the node that computes it; None for an argument.
        known: the constant or the other value to which it is equal, if recognition knows one.
    """

    producer: "Node | None" = None
    known: "Operand | None" = None


@dataclasses.dataclass(eq=False, slots=True)
class Constant(_Typed):
    """A literal of the program, or the known value of a scalar, which may be a symbolic size."""

    value: Any


Operand = Value | Constant


@dataclasses.dataclass(eq=False)
class Node:
    """One equation of the program, or the node with which a rewrite replaced several.

    Attributes:
        name: the name of the primitive.
        params: the parameters of the primitive.
        operands: what it reads when it runs.
        outputs: what it defines.
        equation: the equation it comes from, which has the context and the source line.
        name_stack: that of the equation, below those of the inlined calls around it.
        run: takes the arrays of `operands` and returns those of `outputs`.
        order: its position in the program, or -1 if a rewrite made it.
        has_effects: whether it has effects; nodes with effects keep their order.
        calls: the equations of the inlined calls around it, outermost first.
        inputs: what it reads as recognition sees it: what an operand is known to be, or itself.
    """

    name: str
    params: dict[str, Any]
    operands: list[Operand]
    outputs: list[Value]
    equation: Any
    name_stack: Any
    run: Callable[..., Sequence[Any]]
    order: int = -1
    has_effects: bool = False
    calls: tuple[Any, ...] = ()
    inputs: list[Operand] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.inputs = [seen(operand) for operand in self.operands]


def seen(operand: Operand) -> Operand:
    """What recognition takes an operand to be."""
    return (isinstance(operand, Value) and operand.known) or operand


def source(operand: Operand) -> tuple[Operand, tuple[int | None, ...]]:
    """The array of which an operand is a broadcast, and its axis for each axis of the operand.

    None stands for an axis of size 1, or one along which the operand repeats.
    """
    axes: tuple[int | None, ...] = tuple(
        i if is_long(size) else None for i, size in enumerate(operand.shape)
    )
    while isinstance(operand, Value) and (node := operand.producer) is not None:
        inner = node.inputs[0] if node.inputs else None
        if inner is None:
            break
        if node.name == "broadcast_in_dim" and len(node.inputs) == 1:
            back = {
                int(dim): i
                for i, dim in enumerate(node.params["broadcast_dimensions"])
                if is_long(inner.shape[i])
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
            value = converted(origin.value, origin.dtype, operand.dtype)
            return (operand if value is None else Constant(operand.aval, value)), ()
        elif node.name == "pvary":
            back = {i: i for i in range(len(operand.shape))}
        else:
            break
        axes = tuple(None if axis is None else back.get(axis) for axis in axes)
        operand = inner
    return operand, axes


def _real_axes(shape: Sequence[int]) -> list[int]:
    return [i for i, size in enumerate(shape) if is_long(size)]


def is_reshape_of_ones(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshape only adds and removes axes of size 1."""
    return [n for n in before if is_long(n)] == [n for n in after if is_long(n)]


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
    return any(a is None and is_long(n) for a, n in zip(axes, operand.shape, strict=True))


def evaluate(
    nodes: Iterable[Node], inputs: Sequence[Value], outputs: Sequence[Operand], args: Sequence[Any]
) -> list[Any]:
    """Runs the nodes on arrays or tracers, and drops each value after its last use.

    The results have the weak types of `outputs`, which a fused node does not keep by itself.
    """
    nodes = list(nodes)
    env: dict[Value, Any] = dict(zip(inputs, args, strict=True))
    kept = {value for value in outputs if isinstance(value, Value)}
    last: dict[Value, Node] = {value: node for node in nodes for value in values_of(node.operands)}

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else env[operand]

    for node in nodes:
        arrays = [read(operand) for operand in node.operands]
        with jax_compat.context_of(node.equation, node.name_stack):
            try:
                results = node.run(*arrays)
            except PlaceOfError as place:
                place.is_within(node)
                raise
            except Exception as error:
                raise PlaceOfError(node, error) from error
        env.update(zip(node.outputs, results, strict=True))
        for value in values_of(node.operands):
            if last[value] is node and value not in kept:
                env.pop(value, None)
    return [jax_compat.as_typed(read(operand), operand.aval) for operand in outputs]


def values_of(operands: Iterable[Operand]) -> Iterator[Value]:
    return (operand for operand in operands if isinstance(operand, Value))
