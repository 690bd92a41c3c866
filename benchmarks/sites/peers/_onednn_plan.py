"""Which primitives of oneDNN make up a step, and in which layout of the activations."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.sites.peers import UnavailableError, _dnnl, _dnnl_library
from benchmarks.sites.peers._dnnl import Dnnl, Object, UnimplementedError
from benchmarks.sites.problem import EPSILON, Problem

_NO_ATTRIBUTES: Final = None
_ALPHA: Final = ctypes.c_float(0)  # ReLU's slope below 0
_BETA: Final = ctypes.c_float(0)


@dataclass(frozen=True)
class Layout:
    """An order of the elements in memory; `block` channels of a pixel are next to each other."""

    name: str
    tag: int
    tag_name: str  # as oneDNN calls it, to be sure of the number
    block: int | None = None

    def in_blocks(self, values: np.ndarray) -> np.ndarray:
        """An array in NHWC as this layout has it; one without blocks stays as it is."""
        if self.block is None:
            return values
        batch, height, width, channels = values.shape
        missing = -channels % self.block
        padded = np.pad(values, ((0, 0), (0, 0), (0, 0), (0, missing)))
        blocks = padded.reshape(batch, height, width, -1, self.block)
        return np.ascontiguousarray(blocks.transpose(0, 3, 1, 2, 4))

    def from_blocks(self, values: np.ndarray, channels: int) -> np.ndarray:
        """The inverse of `in_blocks`."""
        if self.block is None:
            return values
        blocks = values.transpose(0, 2, 3, 1, 4)
        return blocks.reshape(*blocks.shape[:3], -1)[..., :channels]


NHWC: Final = Layout("nhwc", 22, "acdb")
NCHW: Final = Layout("nchw", 5, "abcd")
BLOCKED: Final = (Layout("nChw16c", 78, "aBcd16b", 16), Layout("nChw8c", 102, "aBcd8b", 8))


@dataclass(frozen=True)
class Plan:
    """The primitives of a step.

    Attributes:
        relu: whether `forward` and `backward` contain the ReLU, with a workspace for its gate.
        add: whether they contain the addition, too.
        join: otherwise, the addition in place, followed by the ReLU.
        gate: the gradient of that ReLU, which finds its gate in y.
    """

    layout: Layout
    activation: Object
    parameter: Object
    forward: Object
    backward: Object
    relu: bool
    add: bool
    join: Object | None = None
    gate: Object | None = None

    def implementations(self, dnnl: Dnnl) -> dict[str, str]:
        parts = {
            "forward": self.forward,
            "join": self.join,
            "gate": self.gate,
            "backward": self.backward,
        }
        return {name: dnnl.implementation(of) for name, of in parts.items() if of is not None}


def choose(dnnl: Dnnl, problem: Problem, layouts: Sequence[Layout]) -> Plan:
    """The plan in the first layout for which oneDNN has optimised code, or else in any."""
    plans: list[Plan] = []
    for layout in layouts:
        try:
            plans.append(_plan(dnnl, problem, layout))
        except UnimplementedError:
            continue
        if not dnnl.implementation(plans[-1].forward).startswith("ref"):
            return plans[-1]
    if not plans:
        raise UnavailableError(
            f"oneDNN has no {problem.dtype} implementation on this instruction set"
            f" ({_dnnl_library.isa()})"
        )
    return plans[0]


def _plan(dnnl: Dnnl, problem: Problem, layout: Layout) -> Plan:
    if dnnl.tag_name(layout.tag) != layout.tag_name:
        raise UnavailableError("this oneDNN does not number its layouts as others of version 3 do")
    site = problem.site
    dims = (problem.batch, site.channels, site.height, site.width)
    activation = dnnl.array_descriptor(dims, problem.dtype, layout.tag)
    parameter = dnnl.array_descriptor((site.channels,), "float32", _dnnl.TAG_OF_VECTORS)
    if site.form == "batch_norm":
        return Plan(layout, activation, parameter, *_norm(dnnl, activation, 0), False, False)
    if site.form == "bn_relu":
        norm = _norm(dnnl, activation, _dnnl.FUSE_NORM_RELU)
        return Plan(layout, activation, parameter, *norm, True, False)
    try:
        norm = _norm(dnnl, activation, _dnnl.FUSE_NORM_ADD_RELU)
        return Plan(layout, activation, parameter, *norm, True, True)
    except UnimplementedError:  # on all processors until 3.13, and perhaps not in later ones
        norm = _norm(dnnl, activation, 0)
        join, gate = _join(dnnl, activation)
        return Plan(layout, activation, parameter, *norm, False, False, join, gate)


def _norm(dnnl: Dnnl, activation: Object, fused: int) -> tuple[Object, Object]:
    """BatchNorm and its gradient."""
    flags = _dnnl.USE_SCALE | _dnnl.USE_SHIFT | fused
    settings = (ctypes.c_float(EPSILON), flags)
    forward = dnnl.primitive_descriptor(
        "batch_normalization_forward",
        _dnnl.FORWARD_TRAINING,
        activation,
        activation,
        *settings,
        _NO_ATTRIBUTES,
    )
    backward = dnnl.primitive_descriptor(
        "batch_normalization_backward",
        _dnnl.BACKWARD,
        *(activation,) * 3,
        *settings,
        forward,
        _NO_ATTRIBUTES,
    )
    return forward, backward


def _join(dnnl: Dnnl, activation: Object) -> tuple[Object, Object]:
    """y = relu(y + z) in place, and the gradient of this ReLU."""
    after = dnnl.create("post_ops")
    dnnl.call("post_ops_append_eltwise", after, _dnnl.ELTWISE_RELU, _ALPHA, _BETA)
    attributes = dnnl.create("primitive_attr")
    dnnl.call("primitive_attr_set_post_ops", attributes, after)
    three = (activation,) * 3
    join = dnnl.primitive_descriptor("binary", _dnnl.BINARY_ADD, *three, attributes)
    relu = dnnl.primitive_descriptor(
        "eltwise_forward",
        _dnnl.FORWARD_TRAINING,
        _dnnl.ELTWISE_RELU_USE_DST,
        activation,
        activation,
        _ALPHA,
        _BETA,
        _NO_ATTRIBUTES,
    )
    gate = dnnl.primitive_descriptor(
        "eltwise_backward", _dnnl.ELTWISE_RELU_USE_DST, *three, _ALPHA, _BETA, relu, _NO_ATTRIBUTES
    )
    return join, gate
