"""The statistics of a batch, and what the running ones become by them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._layers.promotion import promoted


class BatchStatistics(NamedTuple):
    """Statistics of one batch, in the accumulation dtype.

    Attributes:
        mean: shape (C,), or (num_groups, C) where num_groups > 1.
        var: population variance, with the shape of mean.
        elements: number of elements behind each value: an integer, or an array that broadcasts.
    """

    mean: jax.Array
    var: jax.Array
    elements: jax.Array | int


def running_average(
    old: jax.Array,
    batch: jax.Array,
    momentum: float,
    *,
    dtype: np.dtype,
) -> jax.Array:
    """`momentum*old + (1-momentum)*batch`, where a leading group axis of `batch` is averaged.

    Args:
        old: the running statistic, any shape with C elements.
        batch: shape (C,) or (num_groups, C).
        momentum: weight of the old value.
        dtype: that of the batch statistic in Flax; the result has its promotion with old's dtype.
    """
    if batch.ndim == 2:
        batch = batch.mean(axis=0)
    result = promoted(old.dtype, dtype)
    wide = promoted(result, np.float32)
    new = momentum * old.astype(wide) + (1 - momentum) * batch.astype(wide).reshape(old.shape)
    return new.astype(result)


def unbiased(statistics: BatchStatistics) -> jax.Array:
    """The variance times n/max(n-1, 1), as PyTorch and cuDNN put it into running statistics."""
    var, elements = statistics.var, statistics.elements
    if isinstance(elements, int):
        return var * (elements / max(elements - 1, 1))
    elements = jnp.broadcast_to(elements, var.shape)
    return var * (elements / jnp.maximum(elements - 1, jnp.ones_like(elements)))
