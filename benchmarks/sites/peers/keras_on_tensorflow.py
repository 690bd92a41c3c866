"""Keras on TensorFlow: the layers BatchNormalization, Add and ReLU in a tf.function.

Keras 3 computes the statistics and the normalisation from separate operators, in float32 where x is
of a 16-bit type.
"""

import os
import sys
from typing import Any

from benchmarks.sites.peers import Step, UnavailableError, _tf
from benchmarks.sites.problem import EPSILON, MOMENTUM, DType, Problem

_POLICIES: dict[DType, str] = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}

# Keras chooses its backend when it is first imported, for the whole process.
if "keras" not in sys.modules:
    os.environ["KERAS_BACKEND"] = "tensorflow"

import keras  # noqa: E402


def build(problem: Problem) -> Step:
    if keras.backend.backend() != "tensorflow":
        raise UnavailableError(
            f"Keras was imported before and runs on {keras.backend.backend()}; a process has one"
            " backend, so start a new one"
        )
    policy = _POLICIES[problem.dtype]
    norm = keras.layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON, dtype=policy)
    norm.build(problem.x.shape)
    scale, bias = norm.trainable_variables
    scale.assign(problem.scale)
    bias.assign(problem.bias)
    add, relu = keras.layers.Add(dtype=policy), keras.layers.ReLU(dtype=policy)

    def forward(x: Any, z: Any) -> Any:
        y = norm(x, training=True)
        if z is not None:
            y = add([y, z])
        return y if problem.site.form == "batch_norm" else relu(y)

    parameters = [scale.value, bias.value]
    return _tf.make_step(problem, forward, parameters, [norm.moving_mean, norm.moving_variance])
