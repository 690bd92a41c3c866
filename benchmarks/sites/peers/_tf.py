"""Shared by the TensorFlow peers: operands, one tf.function for the whole step, results back.

The step is not compiled by XLA (`jit_compile`), which takes longer on CPUs: XLA's own fusion is
what the peer `flax` measures. TensorFlow does not say which instruction set its kernels use.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

# Otherwise TensorFlow prints that it contains oneDNN, and which fusions it does not have.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow  # pyright: ignore[reportMissingModuleSource] - it is optional

from benchmarks.common.environment import core_count
from benchmarks.sites.peers import Step
from benchmarks.sites.problem import Problem, Results, biased_running_var

# The stubs that pyright brings lack most of TensorFlow.
tf: Final[Any] = tensorflow

tf.get_logger().setLevel("ERROR")  # it advises against tracing a function for each site
tf.config.set_visible_devices([], "GPU")
tf.config.threading.set_intra_op_parallelism_threads(core_count())


def make_step(
    problem: Problem,
    forward: Callable[[Any, Any], Any],
    parameters: Sequence[Any],
    statistics: Sequence[Any],
    *,
    unbiased: bool = False,
) -> Step:
    """A step of `forward(x, z)` and its gradients by x, z and the parameters, scale and bias.

    `forward` updates the statistics, the variables of the running mean and variance; `unbiased`
    says whether it does so with the unbiased batch variance.
    """
    x, z, dy = (_activation(values, problem) for values in (problem.x, problem.z, problem.dy))

    @tf.function
    def step(x: Any, z: Any, dy: Any) -> Any:
        inputs = [x] if z is None else [x, z]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = forward(x, z)
        return y, tape.gradient(y, [*inputs, *parameters], output_gradients=dy)

    run_forward = tf.function(forward)

    def to_results(outputs: Any) -> Results:
        y, gradients = outputs
        dx, *dz, dscale, dbias = map(_to_numpy, gradients)
        running_mean, running_var = map(_to_numpy, statistics)
        if unbiased:
            running_var = biased_running_var(running_var, problem)
        dz = dz[0] if dz else None
        return Results(_to_numpy(y), running_mean, running_var, dx, dz, dscale, dbias)

    return Step(lambda: step(x, z, dy), lambda: run_forward(x, z), to_results)


def _activation(values: np.ndarray | None, problem: Problem) -> Any:
    return None if values is None else tf.constant(values, getattr(tf, problem.dtype))


def _to_numpy(values: Any) -> np.ndarray:
    return tf.cast(tf.convert_to_tensor(values), tf.float32).numpy().copy()
