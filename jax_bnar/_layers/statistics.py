"""The statistics of a batch, and the update of the running statistics."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._layers.promotion import promoted
from jax_bnar._operators import validation
from jax_bnar._sharding.alignment import split_axis


class BatchStatistics(NamedTuple):
    """Statistics of one batch, in the accumulation dtype.

    Attributes:
        mean: shape (C,), or (num_groups, C) if num_groups > 1.
        var: population variance, with the shape of mean.
        elements: the number of elements behind each value, an integer or a broadcastable array.
    """

    mean: jax.Array
    var: jax.Array
    elements: jax.Array | int


def check_momentum(name: str, momentum: Any) -> None:
    """Checks a layer's weight of the old running value, which may be an array, even a traced one.

    Raises:
        TypeError: it is no number.
        ValueError: it is a Python number outside of 0 to 1.
    """
    if not isinstance(momentum, (np.ndarray, jax.Array)):
        validation.check_momentum("BatchNorm", name, momentum)


def running_average(
    old: jax.Array,
    batch: jax.Array,
    momentum: float | jax.Array,
    *,
    dtype: np.dtype,
) -> jax.Array:
    """`momentum*old + (1-momentum)*batch`; a leading group axis of `batch` is averaged first.

    Args:
        old: the running statistic, any shape with C elements.
        batch: shape (C,) or (num_groups, C).
        momentum: weight of the old value.
        dtype: the dtype that Flax gives the batch statistic. The result's dtype is its promotion
            with the dtype of `old`.
    """
    if batch.ndim == 2:
        batch = batch.mean(axis=0)
    result = promoted(old.dtype, dtype)
    wide = promoted(result, np.float32)
    sharding = jax.typeof(old).sharding
    batch = split_axis(batch.astype(wide), 0, old.shape, sharding.mesh, tuple(sharding.spec))
    new = momentum * old.astype(wide) + (1 - momentum) * batch
    return new.astype(result)


def unbiased(statistics: BatchStatistics) -> jax.Array:
    """The variance times n/max(n-1, 1), as in the running statistics of PyTorch and cuDNN."""
    var, elements = statistics.var, statistics.elements
    if isinstance(elements, int):
        return var * (elements / max(elements - 1, 1))
    elements = jnp.broadcast_to(elements, var.shape)
    return var * (elements / jnp.maximum(elements - 1, jnp.ones_like(elements)))
