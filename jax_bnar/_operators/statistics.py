"""`batch_statistics`: the statistics of BatchNorm alone."""

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from jax_bnar._base.implementation import Implementation
from jax_bnar._operators.forms import take_statistics


class BatchStatisticsResult(NamedTuple):
    """Result of `batch_statistics`.

    Attributes:
        mean: batch mean, float32 (float64 for float64 x), of shape (C,), or (num_groups, C) if
            num_groups > 1.
        var: population variance of the batch, with the shape and dtype of mean.
    """

    mean: jax.Array
    var: jax.Array


def batch_statistics(
    x: ArrayLike,
    *,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    where: ArrayLike | None = None,
    implementation: Implementation = None,
) -> BatchStatisticsResult:
    """Mean and population variance of each channel, over all other axes, in one pass over x.

    They are those of `batch_norm`, with its accuracy: for norms that do something else with them,
    and for monitoring. The operator is differentiable, in both modes and at any order:

        dx = dmean/n + 2*dvar*(x - mean)/n

    with n the number of elements behind each mean. This is left to XLA, which computes it in the
    loop that adds it to the other gradients of x.

    With `where`, only elements count for which it is True, as in `jnp.mean` and `jnp.var`: of a
    padded batch, for example. Others have no effect, even if they are NaN, and their dx is 0. That
    takes two passes, each over a copy of x in which they are replaced. Batch normalisation with
    these statistics is `batch_norm_inference`, `bn_relu_inference` or `bn_add_relu_inference`,
    whose derivatives are those of training then, because mean and var are differentiable operands.

    Args:
        x: as in `bn_add_relu`.
        axis: the channel axis.
        axis_name: name of a mapped axis, or a tuple of names, over which statistics are computed,
            as in `bn_add_relu`, by one all-reduce.
        axis_index_groups: lists of indices of that axis, each with separate statistics.
        num_groups: number of ghost batches.
        where: a bool array that broadcasts to x. Devices may select different numbers of elements.
            Where there are none in all, mean and var are NaN.
        implementation: None, "ffi" or "xla", as in `bn_add_relu`.

    Returns:
        BatchStatisticsResult(mean, var).

    Raises:
        ValueError, TypeError, NameError, NotImplementedError: as in `bn_add_relu`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> mean, var = jax_bnar.batch_statistics(jnp.arange(6.0).reshape(3, 2))
        >>> mean.tolist()
        [2.0, 3.0]
        >>> [round(float(value), 3) for value in var]
        [2.667, 2.667]
    """
    statistics = take_statistics(
        "batch_statistics",
        x,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        num_groups=num_groups,
        where=where,
        implementation=implementation,
    )
    return BatchStatisticsResult(statistics.mean, statistics.var)
