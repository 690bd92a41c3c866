"""Statistics of the elements that a mask selects, by the kernels, which know no masks.

The kernels get an array in which every other element has been replaced by a constant c of its
channel, which is close to the mean. With N elements behind each mean, n of them selected, and the
mean m and the variance v that the kernels find, where d = m - c:

    mean = c + (N/n)*d    var = (N/n)*(v + d^2) - ((N/n)*d)^2

The subtraction loses digits if c is not close to the mean: as many as (mean - c)^2 / var has before
its point. So c is the mean that a first pass finds in the same way with c = 0. Wide dtypes are
centred, so that d is not a small difference of large numbers; 16-bit values would be rounded, so
there d comes from the mean of the first pass, before c was rounded from it. On
other platforms than CPUs, if no axis is named, XLA sums in the loop that replaces the elements
(`jax_bnar._platform_primitives.StatisticsAround`).

The functions above are differentiable, and c is a constant of them, so their derivative is that of
the statistics of the selected elements:

    dx = dmean/n + 2*dvar*(x - mean)/n where selected, else 0
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_bnar._autodiff.statistics import batch_statistics
from jax_bnar._base.dtypes import accumulation_dtype, is_wide
from jax_bnar._base.element_count import element_count
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Statistics
from jax_bnar._base.jax_compat import reconcile_vma
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.collectives import parts_of


class SelectedStatistics(NamedTuple):
    """Statistics of selected elements, and how many there are, of shape (num_groups, C) each.

    mean and var are NaN where there is none. All have the accumulation dtype of x.
    """

    mean: jax.Array
    var: jax.Array
    elements: jax.Array


def selected_statistics(
    x: jax.Array,
    where: jax.Array,
    layout: ChannelLayout,
    implementation: Implementation,
    names: tuple[Any, ...],
    groups: tuple[tuple[int, ...], ...] | None,
) -> SelectedStatistics:
    """Those of the elements of x with a True `where`, taken over the axes `names`.

    Each axis of `where` is as long as that of x, or has length 1.
    """
    x, where = reconcile_vma([x, where])
    spec = jax.typeof(x).sharding.spec
    vector = PartitionSpec(None, spec[layout.axis])
    dtype = accumulation_dtype(x.dtype)

    def around(centre: jax.Array) -> Statistics:
        """The statistics of x, less its centre if its dtype is wide, where others are replaced."""
        (filled,) = with_automatic_axes(
            lambda x, where, centre: (_filled(x, where, centre, layout),),
            (spec,),
            *(x, where, centre),
        )
        of_filled = jnp.zeros_like(centre) if _is_centred(x) else centre
        return batch_statistics(
            filled, layout, implementation, names, groups, of_filled.astype(dtype)
        )

    (elements,) = with_automatic_axes(
        lambda x, where: (_count(where, x, layout),), (vector,), x, where
    )
    parts: jax.Array | int = 1
    if names:
        elements = jax.lax.psum(elements, names, axis_index_groups=groups)
        parts = parts_of(names, groups)
    times = element_count(parts, *layout.group_sizes(x.shape), dtype=dtype) / elements
    zero = jnp.zeros_like(elements)

    def roughly(mean: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
        rough = mean * times
        return rough, _finite(rough).astype(x.dtype)

    rough, centre = with_automatic_axes(
        roughly,
        (vector, vector),
        jax.lax.stop_gradient(around(zero.astype(x.dtype)).mean),
        times,
    )
    found = around(centre)

    def selected(
        found: Statistics, centre: jax.Array, rough: jax.Array, times: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        centre = centre.astype(dtype)
        if _is_centred(x):
            d = found.mean
        else:
            # The difference has the error of a mean, which N/n multiplies. The first pass knows
            # its value better; a constant is added, so its derivative stays.
            d = found.mean - centre
            d = d + _finite(jax.lax.stop_gradient((rough - centre) / times - d))
        offset = times * d
        var = times * (found.var + jnp.square(d)) - jnp.square(offset)
        # Rounding may take a variance of 0 below it; a NaN stays one.
        return centre + offset, jnp.where(var < 0, jnp.zeros_like(var), var)

    mean, var = with_automatic_axes(selected, (vector, vector), found, centre, rough, times)
    return SelectedStatistics(mean, var, elements)


def _is_centred(x: jax.Array) -> bool:
    return is_wide(x.dtype)


def _filled(x: jax.Array, where: jax.Array, centre: jax.Array, layout: ChannelLayout) -> jax.Array:
    """Selected elements, and the centre or, if it is subtracted, 0 instead of all others.

    They are replaced before any arithmetic, so that a NaN or Inf among them cannot reach the
    gradient as 0*Inf.
    """
    of_channel = layout.per_element(centre, x)
    where = jnp.broadcast_to(where, x.shape)
    kept = jnp.where(where, x, of_channel)
    return kept - of_channel if _is_centred(x) else kept


def _count(where: jax.Array, x: jax.Array, layout: ChannelLayout) -> jax.Array:
    """The number of selected elements of x on this device, (num_groups, C), as a float.

    Only the elements that `where` has are added up, as integers, because a float32 sum of ones
    stops growing at 2^24.
    """
    channels = x.shape[layout.axis]
    others = tuple(axis for axis in range(x.ndim) if axis != layout.axis)
    if layout.num_groups > 1:
        where = jnp.broadcast_to(where, (x.shape[0], *where.shape[1:]))
        groups, rows, own_channels, inner = layout.canonical(where.shape)
        counted = where.reshape(groups, rows, own_channels, inner).sum(axis=(1, 3), dtype=jnp.int32)
    else:
        # Without a reshape, which JAX would refuse under a vmap over an axis that is sharded over
        # an Explicit mesh axis.
        counted = where.sum(axis=others, dtype=jnp.int32)[None]
    own = math.prod(where.shape[axis] for axis in others) // layout.num_groups
    repeated = layout.group_elements(x.shape) // own
    counted = jnp.broadcast_to(counted, (layout.num_groups, channels))
    return element_count(counted, repeated, dtype=accumulation_dtype(x.dtype))


def _finite(centre: jax.Array) -> jax.Array:
    """The centre, or 0 if it is infinite: Inf-Inf would turn the mean into a NaN."""
    return jnp.where(jnp.isfinite(centre), centre, jnp.zeros_like(centre))
