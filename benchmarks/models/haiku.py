"""Haiku's own ResNet."""

from collections.abc import Sequence
from typing import Any

import haiku
import jax
import jax.numpy as jnp

from benchmarks.models.network import Network

# Haiku's ResNet always has four groups, which may be empty.
_GROUPS = 4


def transformed(stages: Sequence[int], width: int, classes: int = 10) -> Any:
    """`init` and `apply` of a network that takes images and `is_training`."""

    def forward(images: jax.Array, is_training: bool) -> jax.Array:
        net = haiku.nets.ResNet(
            (*stages, 0, 0, 0)[:_GROUPS],
            classes,
            channels_per_group=[4 * width * 2**group for group in range(_GROUPS)],
            initial_conv_config={"output_channels": width},
        )
        return net(images, is_training)

    return haiku.transform_with_state(forward)


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    net = transformed(stages, width)
    parameters, state = net.init(jax.random.key(0), jnp.zeros(shape, jnp.float32), is_training=True)

    def apply(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        return net.apply(parameters, state, None, images, is_training=True)

    return Network(apply, parameters, state)
