"""A ResNet written with Keras, on its JAX backend."""

import os
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.models.network import STAGES, Network

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this when it is imported
import keras

# The epsilon of keras.applications.
_EPSILON = 1.001e-5


def resnet(stages: Sequence[int], width: int, shape: Sequence[int], classes: int = 10) -> Any:
    """`keras.applications.ResNet50`, or another network with the same order of layers."""
    layers = keras.layers
    if tuple(stages) == STAGES and width == 64:
        return keras.applications.ResNet50(
            weights=None,  # type: ignore[arg-type]
            input_shape=shape[1:],
            classes=classes,
        )

    def norm(x: Any) -> Any:
        return layers.BatchNormalization(epsilon=_EPSILON)(x)

    def block(x: Any, filters: int, strides: int, has_projection: bool) -> Any:
        shortcut = x
        if has_projection:
            shortcut = norm(layers.Conv2D(4 * filters, 1, strides)(x))
        y = layers.ReLU()(norm(layers.Conv2D(filters, 1, strides)(x)))
        y = layers.ReLU()(norm(layers.Conv2D(filters, 3, padding="same")(y)))
        y = norm(layers.Conv2D(4 * filters, 1)(y))
        return layers.ReLU()(layers.Add()([shortcut, y]))

    images = keras.Input(shape[1:])
    x = layers.ReLU()(norm(layers.Conv2D(width, 7, 2, padding="same")(images)))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, size in enumerate(stages):
        for position in range(size):
            strides = 2 if stage > 0 and position == 0 else 1
            x = block(x, width * 2**stage, strides, position == 0)
    outputs = layers.Dense(classes)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, outputs)


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    if keras.backend.backend() != "jax":
        raise ValueError("Keras must run on JAX, but has another backend: set KERAS_BACKEND=jax.")
    keras.utils.set_random_seed(0)
    model = resnet(stages, width, shape)

    def apply(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        return model.stateless_call(parameters, state, images, training=True)

    return Network(
        apply,
        [variable.value for variable in model.trainable_variables],
        [variable.value for variable in model.non_trainable_variables],
    )
