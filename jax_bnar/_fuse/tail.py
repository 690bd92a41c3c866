"""What follows the normalised array: nothing, or residuals and an activation."""

import dataclasses
from collections.abc import Collection
from typing import Any, get_args

import jax.numpy as jnp

from jax_bnar._base.activations import NO_ACTIVATION, RELU, Activation, FusedActivation
from jax_bnar._fuse import activations
from jax_bnar._fuse.curves import curve_of
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Operand, Value, source
from jax_bnar._fuse.relu import is_relu, is_selection_by_sign, looks_like
from jax_bnar._fuse.sizes import is_long
from jax_bnar._fuse.widened import before_widening

_MOST_RESIDUALS = 3
_TAKEN = "it is the residual of another BatchNorm"
# The primitives of layers that come after a norm without an activation, as in a linear bottleneck.
_NEXT_LAYERS = frozenset(
    """
    conv_general_dilated dot_general reduce_window_max reduce_window_sum reduce_sum reduce_max
    """.split()  # noqa: SIM905 (a list would take a line for each)
)


@dataclasses.dataclass(frozen=True)
class Tail:
    """The residuals and the activation that follow a normalised array.

    Attributes:
        result: the last value that the kernel computes.
        residuals: what is added before the activation.
        activation: the activation; that with the name "none" if there is none.
        reason: why the kernel takes no more of what follows; empty if it takes everything.
        wide_result: the value that is rounded to become `result`, or None.
        sums: the normalised array plus the first residual, plus the first two, and so on.
    """

    result: Value
    residuals: tuple[Value, ...] = ()
    activation: FusedActivation = NO_ACTIVATION
    reason: str = ""
    wide_result: Value | None = None
    sums: tuple[Value, ...] = ()

    @property
    def is_activated(self) -> bool:
        return self.activation.name != "none"

    @property
    def has_relu(self) -> bool:
        return self.activation.name == "relu"


def tail_of(graph: Graph, normalised: Value, taken: Collection[Value], dtype: Any = None) -> Tail:
    """What follows a normalised array, and is not `taken` by another match.

    `dtype` is that of x, if it is known. A program with layers of mixed precision often computes
    all of this in float32 for an x of 16 bits, and then rounds the result to the dtype of x, which
    the kernel does as well.
    """
    tail = _tail_of(graph, normalised, taken)
    return _rounded(graph, tail, taken, dtype) or tail


def _rounded(graph: Graph, tail: Tail, taken: Collection[Value], dtype: Any) -> Tail | None:
    """The tail with the conversion to a narrower dtype that follows it, if it has all in it.

    Several residuals would be added in the narrower dtype, where a sum may overflow or lose one of
    them. A ReLU6 whose y rounds to 6 would have the derivative 0 from 5.984 on, in bfloat16. With a
    residual, kernels form dx from a dz that is rounded, unless it is dy or 0, as it is for ReLU and
    without an activation.
    """
    if dtype is None or dtype == tail.result.dtype:
        return None
    if not tail.is_activated and not tail.residuals:
        return None  # A normalised array is never narrower than x.
    if tail.activation.name == "relu6":
        return None
    if len(tail.residuals) > (1 if tail.has_relu or not tail.is_activated else 0):
        return None
    reader = graph.sole_reader(tail.result)
    if reader is None or reader.name != "convert_element_type":
        return None
    result = reader.outputs[0]
    residuals = [before_widening(value, dtype) for value in tail.residuals]
    narrow = [value for value in residuals if value is not None]
    if result.dtype != dtype or result in taken or len(narrow) < len(residuals):
        return None
    return dataclasses.replace(
        tail, result=result, residuals=tuple(narrow), wide_result=tail.result
    )


def _tail_of(graph: Graph, normalised: Value, taken: Collection[Value]) -> Tail:
    value, residuals = normalised, []
    sums: list[Value] = []

    def all_of(
        result: Value, activation: FusedActivation = NO_ACTIVATION, reason: str = ""
    ) -> Tail:
        return Tail(result, tuple(residuals), activation, reason, sums=tuple(sums))

    def end(reason: str) -> Tail:
        """What there is without an activation: one residual, because several are added first."""
        if not residuals:
            return Tail(normalised, reason=reason)
        return Tail(sums[0], tuple(residuals[:1]), reason=reason, sums=tuple(sums[:1]))

    while True:
        curve = curve_of(graph, value)
        if curve is not None and curve.result in taken:
            return Tail(normalised, reason=_TAKEN)
        if curve is not None:
            return all_of(curve.result, curve.activation)
        reader = graph.sole_reader(value)
        if reader is None:
            return end(_why_not_one_reader(graph, value, normalised))
        result = reader.outputs[0]
        adds = reader.name in ("add", "add_any")
        if result in taken:
            # A sum that is the residual of the other match can be the result of this one.
            return all_of(value, reason=_TAKEN) if adds else Tail(normalised, reason=_TAKEN)
        if is_relu(reader):
            return all_of(result, RELU)
        if not adds:
            return end(_why_not(graph, value, reader))
        other = reader.inputs[1] if reader.inputs[0] is value else reader.inputs[0]
        reason = refused_residual(other, value)
        if reason and (name := activations.name_of(value, [reader])):
            reason = _follows(name)
        if reason or len(residuals) == _MOST_RESIDUALS:
            return end(reason or "more residuals are added than the search follows")
        if residuals and value.dtype in (jnp.float16, jnp.bfloat16):
            # They are added to each other first. There their sum may overflow or lose one of them.
            return end(f"several residuals are added in {value.dtype}")
        assert isinstance(other, Value)
        residuals.append(other)
        sums.append(result)
        value = result


def refused_residual(other: Operand, value: Value) -> str:
    """Why an operand cannot be the residual; empty if it can."""
    if other is value:
        return "the array is added to itself"
    origin, axes = source(other)
    if not isinstance(origin, Value) or not isinstance(other, Value):
        return "a constant is added"
    if other.shape != value.shape or any(
        axis is None and is_long(size) for axis, size in zip(axes, other.shape, strict=True)
    ):
        return "what is added is broadcast, but the kernel needs a residual with the shape of x"
    if other.dtype != value.dtype:
        return f"the residual is {other.dtype}, the array {value.dtype}"
    return ""


def _why_not_one_reader(graph: Graph, value: Value, normalised: Value) -> str:
    name = "normalised array" if value is normalised else "pre-activation"
    readers = graph.readers(value)
    if not readers:
        return ""
    unfused = _unfused_activation(graph, value, name)
    if value is not normalised and not unfused and not any(map(is_relu, readers)):
        return ""  # The kernel takes the sum, and no activation follows.
    if value in graph.returned:
        return f"the {name} is also returned"
    return unfused or f"the {name} is used more than once"


def _unfused_activation(graph: Graph, value: Value, name: str) -> str:
    """Which activation several readers make of a value, and why it is not fused; empty if none."""
    readers = graph.readers(value)
    if activation := activations.name_of(value, readers):
        return _follows(activation)
    if is_selection_by_sign(readers):
        return (
            f"a selection by the sign of the {name} follows; if it is meant as a ReLU, write"
            " jax.nn.relu(a) to have it fused"
        )
    if activation := activations.self_gated_name(graph, value):
        return _follows(f"an activation like {activation}")
    return ""


def _why_not(graph: Graph, value: Value, reader: Node) -> str:
    if activation := activations.name_of(value, [reader]):
        return _follows(activation)
    spelling = looks_like(graph, reader)
    if spelling == "relu":
        return (
            "this ReLU is jnp.maximum(a, 0), whose derivative at 0 is 1/2: write jax.nn.relu(a) to"
            " have it fused"
        )
    if spelling == "relu6":
        return (
            "this ReLU6 is jnp.clip(a, 0, 6), whose derivative at 0 and 6 is 1/2: write"
            " jax.nn.relu6(a) to have it fused"
        )
    if reader.name in ("custom_jvp_call", "custom_vjp_call"):
        name = activations.name_of_custom(reader) or "what follows"
        return f"{name} has a custom derivative, which is not that of jax.nn.relu"
    if reader.name == "name":
        return "a checkpoint_name follows, which is not fused"
    if reader.name in _NEXT_LAYERS:
        return ""  # There is nothing that could be fused.
    is_call = reader.name in ("jit", "pjit")
    # JAX's own functions, such as what jnp.pad calls, begin with an underscore.
    return _follows(reader.params["name"].lstrip("_") if is_call else reader.name)


def _follows(name: str) -> str:
    if name in get_args(Activation):  # Such as an ELU with another alpha than 1.
        return f"a form of {name} follows that is not fused"
    return f"{name} follows, which is not fused"
