"""Computes logits with running statistics, for evaluation, prediction and export.

The network may be the one that was trained, or the same with BatchNorm folded into the convolutions
(`runs.Trained.folded`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

Logits = Callable[[Any, jax.Array], jax.Array]


def normalise(images: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """Normalises uint8 pictures to float32 with mean 0 and standard deviation 1, on the device.

    Doing it there transfers one byte per value instead of four.
    """
    white, channels = 255, (1,) * (images.ndim - 1) + (-1,)
    shift = jnp.asarray(mean, jnp.float32).reshape(channels) * white
    scale = 1 / (jnp.asarray(std, jnp.float32).reshape(channels) * white)
    return (images.astype(jnp.float32) - shift) * scale


def logits_function(net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> Logits:
    """A function from (variables, uint8 pictures (N, H, W, C)) to float32 logits (N, classes)."""

    def logits(variables: Any, images: jax.Array) -> jax.Array:
        result = net.apply(variables, normalise(images, mean, std), train=False)
        return jnp.asarray(result, jnp.float32)

    return logits
