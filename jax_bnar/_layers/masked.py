"""Batch normalisation with statistics over the elements that a mask selects, in plain JAX.

The operators do not support masks, so this path has no kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_bnar import reference
from jax_bnar._base.activations import Activation
from jax_bnar._base.inputs import Statistics
from jax_bnar._layers.statistics import BatchStatistics
from jax_bnar._operators.validation import Operands, check_epsilon
from jax_bnar._sharding.alignment import with_automatic_axes


def normalise(
    operands: Operands,
    mask: jax.Array,
    *,
    epsilon: float,
    activation: Activation,
    negative_slope: float,
    axis_name: Any,
    axis_index_groups: Any,
) -> tuple[jax.Array, BatchStatistics]:
    """(y, statistics) where only elements of x with a True mask, of the shape of x, count.

    Statistics cover the whole batch over the named axes, weighted by the number of such elements.
    """
    (x,), z, affine, layout = operands

    def canonical_normalise(
        x: jax.Array, z: Any, affine: Any, mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        shape = layout.canonical(x.shape)
        statistics = _statistics(
            x.reshape(shape), mask.reshape(shape), axis_name, axis_index_groups
        )
        y, _ = reference.normalise(
            (x.reshape(shape),),
            None if z is None else z.reshape(shape),
            affine,
            (Statistics(statistics.mean, statistics.var),),
            epsilon=check_epsilon("BatchNorm", epsilon),
            activation=activation,
            negative_slope=negative_slope,
            save_mask=False,
        )
        return y.reshape(x.shape), *(jnp.asarray(s) for s in statistics)

    spec = jax.typeof(x).sharding.spec
    vector = PartitionSpec(None, spec[layout.axis])
    y, *statistics = with_automatic_axes(
        canonical_normalise, (spec, vector, vector, vector), x, z, affine, mask
    )
    if layout.num_groups == 1:
        statistics = [s[0] for s in statistics]
    return y, BatchStatistics(*statistics)


def _statistics(
    x: jax.Array, mask: jax.Array, axis_name: Any, axis_index_groups: Any
) -> BatchStatistics:
    """Statistics of canonical x, (G, C) each, over its selected elements on all devices.

    Sums and counts are reduced separately, so devices with different counts are weighted correctly.
    This takes two passes, the second relative to an estimate of the mean, because E[x^2]-E[x]^2
    would lose the variance if |mean| >> std.
    """
    wide = reference.widened(x)
    # Other elements are zeroed before any arithmetic, so that a NaN or Inf among them cannot reach
    # the gradient as 0*Inf.
    wide = jnp.where(mask, wide, jnp.zeros_like(wide))

    def across_devices(local: jax.Array) -> jax.Array:
        if axis_name is None:
            return local
        return jax.lax.psum(local, axis_name, axis_index_groups=axis_index_groups)

    def total(array: jax.Array) -> jax.Array:
        return across_devices(jnp.where(mask, array, jnp.zeros_like(array)).sum(axis=(1, 3)))

    def around(array: jax.Array, centre: jax.Array) -> jax.Array:
        return array - reference.per_element(centre, x)

    # The count is an integer, because a float32 sum of ones stops growing at 2^24.
    elements = across_devices(mask.sum(axis=(1, 3), dtype=jnp.int32)).astype(wide.dtype)
    estimate = jax.lax.stop_gradient(total(wide) / elements)
    # An infinite estimate is replaced, because Inf-Inf would turn the mean into a NaN.
    estimate = jnp.where(jnp.isfinite(estimate), estimate, jnp.zeros_like(estimate))
    centred = around(wide, estimate)
    offset = total(centred) / elements
    # Relative to estimate + offset unrounded: the rounding error of the mean alone would show in a
    # variance far below it.
    var = total(jnp.square(around(centred, offset))) / elements
    return BatchStatistics(estimate + offset, var, elements)
