"""Eager Paddle: `paddle.nn.functional.batch_norm` in NHWC, an addition and a ReLU, `paddle.grad`.

This is the form of Paddle's own ResNet. Paddle's CPU kernels of these operators are its own: they
use neither oneDNN nor, for most of the work, more than one thread, whatever number it is given.
There are none of bfloat16 and float16, and its fused BatchNorm-Add-ReLU is for GPUs.
"""

import sys
from typing import Any

import numpy as np

from benchmarks.common.environment import core_count
from benchmarks.sites.peers import Step, UnavailableError
from benchmarks.sites.problem import (
    EPSILON,
    MOMENTUM,
    RUNNING_MEAN,
    RUNNING_VAR,
    DType,
    Problem,
    Results,
)

# Paddle 3.3 beside TensorFlow 2.21, in one process, ends in a segmentation fault while it is
# imported. The other way round both work.
if "tensorflow" in sys.modules and "paddle" not in sys.modules:
    raise UnavailableError(
        "Paddle crashes if it is imported after TensorFlow, which is loaded; start a new process"
    )

import paddle
from paddle.nn import functional


def build(problem: Problem) -> Step:
    paddle.device.set_device("cpu")
    paddle.set_flags({"FLAGS_paddle_num_threads": core_count()})
    _require_kernel(problem.dtype)
    x, dy = _tensor(problem.x, problem.dtype), _tensor(problem.dy, problem.dtype)
    z = None if problem.z is None else _tensor(problem.z, problem.dtype)
    scale, bias = _tensor(problem.scale), _tensor(problem.bias)
    running_mean = paddle.full_like(bias, RUNNING_MEAN)
    running_var = paddle.full_like(bias, RUNNING_VAR)
    inputs = [operand for operand in (x, z, scale, bias) if operand is not None]
    for operand in inputs:
        operand.stop_gradient = False

    def forward() -> Any:
        y = functional.batch_norm(
            x,
            running_mean,
            running_var,
            scale,
            bias,
            training=True,
            momentum=MOMENTUM,
            epsilon=EPSILON,
            data_format="NHWC",
        )
        if z is not None:
            y = y + z
        return y if problem.site.form == "batch_norm" else functional.relu(y)

    def run() -> Any:
        y = forward()
        return y, paddle.grad(y, inputs, dy)

    def run_forward() -> Any:
        with paddle.no_grad():
            return forward()

    def to_results(outputs: Any) -> Results:
        y, gradients = outputs
        dx, *dz, dscale, dbias = map(_to_numpy, gradients)
        return Results(
            _to_numpy(y),
            _to_numpy(running_mean),
            _to_numpy(running_var),
            dx,
            dz[0] if dz else None,
            dscale,
            dbias,
        )

    return Step(run, run_forward, to_results)


def _require_kernel(dtype: DType) -> None:
    """Raises UnavailableError if Paddle's BatchNorm has no kernel of this type for CPUs."""
    x, parameter = paddle.ones([1, 1, 1, 1], dtype), paddle.ones([1])
    try:
        functional.batch_norm(x, *[parameter] * 4, training=True, data_format="NHWC")
    except RuntimeError as error:
        if "is not registered" not in str(error):
            raise
        raise UnavailableError(f"Paddle has no {dtype} implementation for CPUs") from error


def _tensor(values: np.ndarray, dtype: DType = "float32") -> Any:
    """A tensor in memory that Paddle owns."""
    return paddle.to_tensor(values.copy(), dtype, place=paddle.CPUPlace())


def _to_numpy(values: Any) -> np.ndarray:
    return values.astype("float32").numpy().copy()
