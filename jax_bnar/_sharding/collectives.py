"""What crosses devices: the merge of statistics, and of the sums of backward.

Forward is one all-reduce of 2*C float64 values for each statistics group that spans devices,
backward one of 2*C float32 values; never an activation.

Each device has the mean and variance of its own part, which lose nothing however far below mean^2
the variance lies. Their merge must not lose it again. With p parts of equal size,

    mean = sum(mean_i)/p    var = sum(var_i + mean_i^2)/p - mean^2

cancels by (mean/std)^2. So the small vectors, and nothing else, cross in float64. The ways in
float32 are worse: two all-reduces, of the means and then of var_i + (mean_i - mean)^2, wait for the
network twice at each of the 53 sites of a ResNet-50, and the mean is itself a float32 sum; one
all-reduce with a slot for every device grows with their number. Largest relative error of the
variance over eight devices, and of the mean in units in the last place:

    mean/std                    1       1e2     1e3     1e4     1e6     mean
    one all-reduce, float32     9e-7    7e-3    0.8     92      8e5     2.1 ulp
    two all-reduces, float32    1e-7    4e-7    4e-6    8e-5    8e-2    2.1 ulp
    one all-reduce, float64     2e-8    4e-7    4e-6    8e-5    6e-3    0.7 ulp

What is left comes from each device's mean, rounded to float32. Float64 data has no wider type to
cross in and takes the two all-reduces.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base import jax_compat

Pair = tuple[jax.Array, jax.Array]


class Span(Protocol):
    """How statistics groups lie on devices: each is made of `parts` parts of equal size.

    `sum` takes a value for each part on this device and gives those of the groups; `select` takes
    values of the groups and gives those of this device's parts. Groups and parts are the axis
    before the last; where the device has one part of each group `select` does nothing.

    `shares_scale` says whether all these devices are known to have the same scale.
    """

    @property
    def parts(self) -> jax.Array | int: ...

    @property
    def shares_scale(self) -> bool: ...

    def sum(self, array: jax.Array) -> jax.Array: ...

    def select(self, vector: jax.Array) -> jax.Array: ...

    def sum_backward(self, sums: Pair, cotangents: Pair) -> tuple[Pair, Pair]:
        """Sums, and the cotangents of mean and var, of whole groups from those of the parts."""
        ...


class NamedSpan:
    """Parts on the devices (or examples) along named axes: `shard_map`, `pmap`, `vmap`.

    The scale may be mapped over them as x is. Whether it is cannot be seen from inside of a vmap,
    and the answer would save nothing: with or without it a device multiplies its two sums by a.
    """

    shares_scale = False

    def __init__(
        self, axis_name: tuple[Any, ...], axis_index_groups: Any, parts: jax.Array | int
    ) -> None:
        self.parts = parts
        self._axis_name = axis_name
        self._axis_index_groups = axis_index_groups

    def sum(self, array: jax.Array) -> jax.Array:
        return jax.lax.psum(array, self._axis_name, axis_index_groups=self._axis_index_groups)

    def select(self, vector: jax.Array) -> jax.Array:
        return vector

    def sum_backward(self, sums: Pair, cotangents: Pair) -> tuple[Pair, Pair]:
        # Where JAX knows x to vary over an axis (check_vma=True), mean and var are one value to all
        # its devices, and so are their cotangents. Elsewhere each device has cotangents of its own.
        names, varying = self._axis_name, jax_compat.varying_axes(sums[0])
        apart = tuple(name for name in names if name not in varying)
        if apart == names:
            all_four = sum_packed(self, *jax_compat.reconcile_vma([*sums, *cotangents]))
            return (all_four[0], all_four[1]), (all_four[2], all_four[3])
        total, centred = sum_packed(self, *sums)
        if apart:
            dmean, dvar = sum_packed(NamedSpan(apart, None, 1), *cotangents)
            cotangents = dmean, dvar
        return (total, centred), cotangents


def parts_of(axis_name: Any, axis_index_groups: Any) -> jax.Array | int:
    """Number of devices whose statistics are merged with this one's."""
    if axis_index_groups is None:
        return jax.lax.axis_size(axis_name)
    sizes = {index: len(group) for group in axis_index_groups for index in group}
    if len(sizes) != jax.lax.axis_size(axis_name):
        raise ValueError(
            f"axis_index_groups={axis_index_groups!r} must hold each index of the axis"
            f" {axis_name!r} exactly once; the axis has {jax.lax.axis_size(axis_name)} indices."
        )
    if len(set(sizes.values())) == 1:
        return len(axis_index_groups[0])
    # Not psum(1): with groups that is the size of the first one for all.
    table = jnp.asarray([sizes[index] for index in range(len(sizes))], np.int32)
    return table[jax.lax.axis_index(axis_name)]


def sum_packed(span: Span, *vectors: jax.Array) -> list[jax.Array]:
    """The sums of vectors of equal shape, in one all-reduce."""
    return jnp.split(span.sum(jnp.concatenate(vectors, axis=-1)), len(vectors), axis=-1)


def merge_statistics(mean: jax.Array, var: jax.Array, span: Span) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of whole groups from those of this device's parts."""
    if mean.dtype == np.float64:
        parts = jnp.asarray(span.parts).astype(mean.dtype)
        whole = span.sum(mean) / parts
        return whole, span.sum(var + jnp.square(mean - span.select(whole))) / parts
    # Without jax_enable_x64 it is this context that lets float64 exist.
    with jax.enable_x64(True):
        wide_mean, wide_var = (v.astype(np.float64) for v in (mean, var))
        parts = jnp.asarray(span.parts).astype(np.float64)
        first, second = sum_packed(span, wide_mean, wide_var + jnp.square(wide_mean))
        first, second = first / parts, second / parts
        # The difference may come out below 0 by a rounding; a NaN stays one.
        merged = jnp.maximum(second - jnp.square(first), jnp.zeros_like(second))
        return first.astype(mean.dtype), merged.astype(var.dtype)
