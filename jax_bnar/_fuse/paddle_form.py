"""Patterns in the form in which PaddlePaddle's pass (FusedBnAddActPattern) prints its own.

Each operator has a line with the tensors that it reads and writes. These lines are preceded by the
sets of all tensors, of those that no operator writes, and of those that no operator reads.
"""

from collections.abc import Iterable, Sequence

import jax

# What the operators write besides the array.
_OUT = "mean_out variance_out saved_mean saved_variance reserve_space"
_OUT_2 = "mean_out2 variance_out2 saved_mean2 saved_variance2 reserve_space2"
# What the fused operators read in backward.
_SAVED = "x scale bias relu_out2 saved_mean saved_variance reserve_space"

_BATCH_NORM = f"batch_norm_: x mean variance scale bias -> out {_OUT}"
_BATCH_NORM_GRAD = f"batch_norm_grad: x scale bias {_OUT} out_grad -> x_grad scale_grad bias_grad"
_INFERENCE = "batch_norm_: x mean variance scale bias -> out"

# For each public operator the patterns that become it, by name: the operators of Paddle before and
# after, as "name: inputs -> outputs".
_PATTERNS = {
    "bn_add_relu": {
        "FusedBnAddActPattern": (
            [_BATCH_NORM, "add: out z -> add_out", "relu: add_out -> relu_out"],
            [f"fused_bn_add_activation: x z scale bias mean variance -> relu_out {_OUT}"],
        ),
        "FusedBnAddActGradPattern": (
            [
                _BATCH_NORM,
                "add: out z -> add_out",
                "relu: add_out -> relu_out1",
                "relu_grad: relu_out2 relu_out_grad -> add_out_grad",
                "add_grad: out z add_out_grad -> out_grad z_grad",
                _BATCH_NORM_GRAD,
            ],
            [
                f"fused_bn_add_activation: x z scale bias mean variance -> relu_out1 {_OUT}",
                f"fused_bn_add_activation_grad: {_SAVED} relu_out_grad"
                " -> x_grad z_grad scale_grad bias_grad",
            ],
        ),
    },
    "bn_relu": {
        "FusedBnActPattern": (
            [_BATCH_NORM, "relu: out -> relu_out"],
            [f"fused_batch_norm_act: x scale bias mean variance -> relu_out {_OUT}"],
        ),
        "FusedBnActGradPattern": (
            [
                _BATCH_NORM,
                "relu: out -> relu_out1",
                "relu_grad: relu_out2 relu_out_grad -> out_grad",
                _BATCH_NORM_GRAD,
            ],
            [
                f"fused_batch_norm_act: x scale bias mean variance -> relu_out1 {_OUT}",
                f"fused_batch_norm_act_grad: {_SAVED} relu_out_grad -> x_grad scale_grad bias_grad",
            ],
        ),
    },
    "batch_norm": {
        "FusedBnPattern": (
            [_BATCH_NORM],
            [f"fused_batch_norm: x mean variance scale bias -> out {_OUT}"],
        ),
    },
    "dual_bn_add_relu": {
        "FusedDualBnAddActPattern": (
            [
                _BATCH_NORM,
                f"batch_norm_: x2 mean2 variance2 scale2 bias2 -> out2 {_OUT_2}",
                "add: out out2 -> add_out",
                "relu: add_out -> relu_out",
            ],
            [
                "fused_dual_bn_add_activation: x x2 scale bias scale2 bias2"
                f" mean variance mean2 variance2 -> relu_out {_OUT} {_OUT_2}"
            ],
        ),
    },
    "bn_add_relu_inference": {
        "FusedBnAddActInferPattern": (
            [_INFERENCE, "add: out z -> add_out", "relu: add_out -> relu_out"],
            ["fused_bn_add_activation_infer: x z scale bias mean variance -> relu_out"],
        ),
    },
    "bn_relu_inference": {
        "FusedBnActInferPattern": (
            [_INFERENCE, "relu: out -> relu_out"],
            ["fused_batch_norm_act_infer: x scale bias mean variance -> relu_out"],
        ),
    },
}


def text(operators: Iterable[str]) -> str:
    """The patterns that become the given operators; Paddle has none for `bn_act` and statistics."""
    parts = []
    for operator in operators:
        for name, graphs in _PATTERNS.get(operator, {}).items():
            for kind, graph in zip(("source", "result"), graphs, strict=True):
                parts.append(f"The {kind} pattern graph in [{name}]:\n\n{_graph(graph)}\n\n\n")
    devices = {device.device_kind: None for device in jax.devices()}
    return "".join(parts) + f"device name:  {', '.join(devices)}\n"


def _graph(operators: Sequence[str]) -> str:
    given: dict[str, None] = {}
    read: dict[str, None] = {}
    lines = []
    for operator in operators:
        name, tensors = operator.split(": ")
        inputs, outputs = tensors.split(" -> ")
        read.update(dict.fromkeys(inputs.split()))
        given.update(dict.fromkeys(outputs.split()))
        lines.append(f"  pd_op.{name} : inputs[ {inputs} ], outputs[ {outputs} ]")
    sets = {
        "All Tensors": [*given, *(tensor for tensor in read if tensor not in given)],
        "Input Tensors": [tensor for tensor in read if tensor not in given],
        "Output Tensors": [tensor for tensor in given if tensor not in read],
    }
    listed = (f"{title}:\n  {'  '.join(tensors)}\n" for title, tensors in sets.items())
    return "\n".join([*listed, *lines])
