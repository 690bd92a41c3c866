"""Patterns in the form in which PaddlePaddle's pass (FusedBnAddActPattern) prints its own.

Each operator has a line with the tensors that it reads and writes. These lines are preceded by the
sets of all tensors, of those that no operator writes, and of those that no operator reads.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Operator:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pattern:
    name: str
    source: tuple[Operator, ...]
    result: tuple[Operator, ...]


def _operator(name: str, inputs: str, outputs: str) -> Operator:
    return Operator(f"pd_op.{name}", tuple(inputs.split()), tuple(outputs.split()))


_STATISTICS = "mean_out variance_out saved_mean saved_variance reserve_space"
_BATCH_NORM = _operator("batch_norm_", "x mean variance scale bias", f"out {_STATISTICS}")
_BATCH_NORM_GRAD = _operator(
    "batch_norm_grad",
    "x scale bias mean_out variance_out saved_mean saved_variance reserve_space out_grad",
    "x_grad scale_grad bias_grad",
)


def _forward(name: str, middle: Sequence[Operator], residual: str) -> Pattern:
    fused = _operator(
        "fused_bn_add_activation" if residual else "fused_batch_norm_act",
        f"x {residual} scale bias mean variance",
        f"relu_out {_STATISTICS}",
    )
    return Pattern(name, (_BATCH_NORM, *middle), (fused,))


_ADD_RELU = _forward(
    "FusedBnAddActPattern",
    [_operator("add", "out z", "add_out"), _operator("relu", "add_out", "relu_out")],
    "z",
)
_RELU = _forward("FusedBnActPattern", [_operator("relu", "out", "relu_out")], "")

_ADD_RELU_GRAD = Pattern(
    "FusedBnAddActGradPattern",
    (
        _BATCH_NORM,
        _operator("add", "out z", "add_out"),
        _operator("relu", "add_out", "relu_out1"),
        _operator("relu_grad", "relu_out2 relu_out_grad", "add_out_grad"),
        _operator("add_grad", "out z add_out_grad", "out_grad z_grad"),
        _BATCH_NORM_GRAD,
    ),
    (
        _operator(
            "fused_bn_add_activation",
            "x z scale bias mean variance",
            f"relu_out1 {_STATISTICS}",
        ),
        _operator(
            "fused_bn_add_activation_grad",
            "x scale bias relu_out2 saved_mean saved_variance reserve_space relu_out_grad",
            "x_grad z_grad scale_grad bias_grad",
        ),
    ),
)
_RELU_GRAD = Pattern(
    "FusedBnActGradPattern",
    (
        _BATCH_NORM,
        _operator("relu", "out", "relu_out1"),
        _operator("relu_grad", "relu_out2 relu_out_grad", "out_grad"),
        _BATCH_NORM_GRAD,
    ),
    (
        _operator("fused_batch_norm_act", "x scale bias mean variance", f"relu_out1 {_STATISTICS}"),
        _operator(
            "fused_batch_norm_act_grad",
            "x scale bias relu_out2 saved_mean saved_variance reserve_space relu_out_grad",
            "x_grad scale_grad bias_grad",
        ),
    ),
)

_STATISTICS_2 = "mean_out2 variance_out2 saved_mean2 saved_variance2 reserve_space2"
_DUAL = Pattern(
    "FusedDualBnAddActPattern",
    (
        _BATCH_NORM,
        _operator("batch_norm_", "x2 mean2 variance2 scale2 bias2", f"out2 {_STATISTICS_2}"),
        _operator("add", "out out2", "add_out"),
        _operator("relu", "add_out", "relu_out"),
    ),
    (
        _operator(
            "fused_dual_bn_add_activation",
            "x x2 scale bias scale2 bias2 mean variance mean2 variance2",
            f"relu_out {_STATISTICS} {_STATISTICS_2}",
        ),
    ),
)
_PLAIN = Pattern(
    "FusedBnPattern",
    (_BATCH_NORM,),
    (_operator("fused_batch_norm", "x mean variance scale bias", f"out {_STATISTICS}"),),
)


def _inference(name: str, residual: str) -> Pattern:
    norm = _operator("batch_norm_", "x mean variance scale bias", "out")
    relu = _operator("relu", "add_out" if residual else "out", "relu_out")
    add = [_operator("add", "out z", "add_out")] if residual else []
    fused = "fused_bn_add_activation" if residual else "fused_batch_norm_act"
    result = _operator(f"{fused}_infer", f"x {residual} scale bias mean variance", "relu_out")
    return Pattern(name, (norm, *add, relu), (result,))


_PATTERNS = {
    "bn_add_relu": (_ADD_RELU, _ADD_RELU_GRAD),
    "bn_relu": (_RELU, _RELU_GRAD),
    "batch_norm": (_PLAIN,),
    "dual_bn_add_relu": (_DUAL,),
    "bn_add_relu_inference": (_inference("FusedBnAddActInferPattern", "z"),),
    "bn_relu_inference": (_inference("FusedBnActInferPattern", ""),),
}


def patterns(operators: Iterable[str]) -> list[Pattern]:
    """The patterns that become the given public operators."""
    return [pattern for operator in operators for pattern in _PATTERNS[operator]]


def text(operators: Iterable[str]) -> str:
    parts = []
    for pattern in patterns(operators):
        for kind, graph in (("source", pattern.source), ("result", pattern.result)):
            heading = f"The {kind} pattern graph in [{pattern.name}]:"
            parts.append(f"{heading}\n\n{_graph(graph)}\n\n\n")
    devices = {device.device_kind: None for device in jax.devices()}
    return "".join(parts) + f"device name:  {', '.join(devices)}\n"


def _graph(operators: Sequence[Operator]) -> str:
    given = dict.fromkeys(tensor for op in operators for tensor in op.outputs)
    read = dict.fromkeys(tensor for op in operators for tensor in op.inputs)
    sets = {
        "All Tensors": [*given, *(tensor for tensor in read if tensor not in given)],
        "Input Tensors": [tensor for tensor in read if tensor not in given],
        "Output Tensors": [tensor for tensor in given if tensor not in read],
    }
    lines = [f"{name}:\n  {'  '.join(tensors)}\n" for name, tensors in sets.items()]
    lines += [
        f"  {op.name} : inputs[ {' '.join(op.inputs)} ], outputs[ {' '.join(op.outputs)} ]"
        for op in operators
    ]
    return "\n".join(lines)
