"""Small arrays, convolved and differentiated, for tests of what programs are lowered to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.compiled.programs import convolve

CHANNELS = 8
# Four pictures of 3x5, volumes of 3x5x2, and sequences.
PICTURE, VOLUME, SEQUENCE = (4, 3, 5, CHANNELS), (4, 3, 5, 2, CHANNELS), (4, 3, CHANNELS)


def convolution(x: jax.Array, axis: int = -1) -> jax.Array:
    """Of the channels, which come first or last, with themselves."""
    kernel = jnp.ones((1,) * (x.ndim - 2) + (x.shape[axis],) * 2, x.dtype)
    return convolve(x, kernel, axis)


def with_gradient(forward: Callable[[jax.Array], jax.Array], x: jax.Array) -> Any:
    y, vjp = jax.vjp(forward, x)
    return y, vjp(y)
