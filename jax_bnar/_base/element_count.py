"""Numbers of elements in the dtype in which a sum is divided by them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


def element_count(*sizes: int | jax.Array, dtype: Any) -> jax.Array:
    """The product of sizes, each of which may be a number, symbolic (jax.export) or an array.

    They are converted before they are multiplied, because JAX has 32-bit integers unless x64 is
    enabled, and 2^31 elements of a channel, on all devices together, are possible.
    """
    known = math.prod(size for size in sizes if isinstance(size, int))
    others = [jnp.asarray(size).astype(dtype) for size in sizes if not isinstance(size, int)]
    return functools.reduce(jnp.multiply, others, jnp.asarray(known, dtype))
