"""The mathematics in plain `jax.numpy`, on canonical (G, N, C, S) arrays.

This module is internal and may change without notice: pass `implementation="xla"` to an operator of
`jax_bnar` to compute with it.

There is one function for each operation of `jax_bnar._kernels.kernel_call`, with the same operands
and results. These functions are used on platforms without a kernel, for `implementation="xla"`, and
for the derivatives of the primitives. Vectors (scale, bias, mean, ...) have shape (G, C) or (1, C)
and the accumulation dtype.

Formulas, with n = N*S elements in a statistics group:

    mean = sum(x)/n    var = sum((x-mean)^2)/n    rstd = 1/sqrt(var+epsilon)
    y = act(scale*(x-mean)*rstd + bias + z)
    e = dy where y > 0 else 0    dz = e    dbias = sum(e)    dscale = rstd*sum(e*(x-mean))
    dx = a*e + b*(x-mean) + k

The term (x-mean) must be kept: b*x + k' would lose digits if |mean| >> std.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_bnar._base.canonical import mask_bytes
from jax_bnar._base.config import Activation, Gate
from jax_bnar._base.dtypes import accumulation_dtype, smallest_epsilon

REDUCED = (1, 3)  # the axes N and S


class Coefficients(NamedTuple):
    """b and k of dx = a*e + b*(x-mean) + k, with a = scale*rstd; each has shape (G, C)."""

    b: jax.Array
    k: jax.Array


def widened(x: jax.Array) -> jax.Array:
    """x in its accumulation dtype."""
    return x.astype(accumulation_dtype(x.dtype))


def per_element(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A (G, C) or (1, C) vector, broadcast to x explicitly (for strict rank promotion)."""
    return jnp.broadcast_to(vector[:, None, :, None], x.shape)


def reciprocal_std(var: jax.Array, epsilon: float) -> jax.Array:
    return jax.lax.rsqrt(var + jnp.asarray(max(epsilon, smallest_epsilon(var.dtype)), var.dtype))


def scaled_rstd(rstd: jax.Array, scale: jax.Array | None) -> jax.Array:
    """a = scale*rstd; either operand may have a single group that applies to all."""
    return rstd if scale is None else rstd * scale


def multiplier(var: jax.Array, scale: jax.Array | None, epsilon: float) -> jax.Array:
    """a of y = act(a*(x-mean) + bias + z)."""
    return scaled_rstd(reciprocal_std(var, epsilon), scale)


def pack_mask(positive: jax.Array) -> jax.Array:
    """Packs (G, N, C, S) booleans into (G, ceil(N*C*S/8)) bytes, lowest bit first."""
    groups, *rest = positive.shape
    count = mask_bytes(*rest)
    flat = positive.reshape(groups, -1)
    # packbits adds 8 bits of padding if it cannot prove that 8 divides a symbolic size
    # (jax.export).
    whole = jax.lax.pad(flat, False, ((0, 0, 0), (0, 8 * count - flat.shape[1], 0)))
    return jnp.packbits(whole.reshape(groups, count, 8), axis=2, bitorder="little")[:, :, 0]


def unpack_mask(mask: jax.Array, like: jax.Array) -> jax.Array:
    count = like.size // like.shape[0]
    # A slice, because the argument `count` of unpackbits cannot be symbolic (jax.export).
    bits = jnp.unpackbits(mask, axis=1, bitorder="little")[:, :count]
    return bits.astype(bool).reshape(like.shape)


def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and population variance, (G, C) each, in one pass over x:

        mean = centre + E[x-centre]    var = E[(x-centre)^2] - E[x-centre]^2

    With 0 as the centre, var would be off by 26 % at mean/std = 1000. A centre at a distance of
    s standard deviations from the mean multiplies the rounding errors of the sums by 1 + s^2.
    """
    wide = widened(x)
    centre = widened(_centre(x))
    # Derivatives flow through the sums only, because mean and var do not depend on the centre.
    centred = wide - per_element(centre, x)
    offset = centred.mean(axis=REDUCED)
    var = jnp.square(centred).mean(axis=REDUCED) - jnp.square(offset)
    # Rounding may make the difference negative; `where` keeps a NaN.
    return centre + offset, jnp.where(var < 0, jnp.zeros_like(var), var)


# How many elements of each channel decide about its centre: three, three times.
_SAMPLES = 27
# Steps whose multiples modulo 1 are spread evenly over a line or a square (Roberts, "The
# unreasonable effectiveness of quasirandom sequences", 2018). Even steps could meet nothing but the
# borders of the images.
_ROW_STEP, _INNER_STEP = 0.7548776662466927, 0.5698402909980532


def _centre(x: jax.Array) -> jax.Array:
    """An element of each channel that is near its mean, (G, C).

    It is the median of three medians of three medians of three elements, which are spread over the
    group. For normal data, it is 0.3 standard deviations from the mean; outliers, borders and
    padding do not move it. It is exactly an element, so XLA may compute it in several places, and a
    constant channel has exactly this mean and no variance.
    """
    rows, inner = x.shape[1], x.shape[3]
    sample = jax.lax.stop_gradient(x)[
        :, _spread(rows, _ROW_STEP), :, _spread(inner, _INNER_STEP)
    ]  # (27, G, C)
    while sample.shape[0] > 1:
        a, b, c = jnp.split(sample, 3)
        low, high = jnp.minimum(a, b), jnp.maximum(a, b)
        sample = jnp.maximum(low, jnp.minimum(high, c))
    centre = sample[0]
    # Relative to an infinity, the mean would be a NaN.
    return jnp.where(jnp.isfinite(centre), centre, jnp.zeros_like(centre))


def _spread(size: int, step: float) -> jax.Array:
    """Indices below `size`, which may be symbolic (jax.export)."""
    unit = 2**15  # The products below fit into 32 bits.
    fractions = [int((k + 0.5) * step * unit) % unit for k in range(_SAMPLES)]
    # The integer part of size * fraction / unit.
    return jnp.asarray([size // unit * f + size % unit * f // unit for f in fractions])


def normalise(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    epsilon: float,
    activation: Activation,
    save_mask: bool,
) -> tuple[jax.Array, ...]:
    """(y,) or (y, mask), computed in the accumulation dtype and rounded once, at the end."""
    y = (widened(x) - per_element(mean, x)) * per_element(multiplier(var, scale, epsilon), x)
    if bias is not None:
        y = y + per_element(bias, x)
    if z is not None:
        y = y + widened(z)
    if activation == "relu":
        y = jax.nn.relu(y)
    y = y.astype(x.dtype)
    mask = (pack_mask(y > 0),) if save_mask else ()
    return (y if z is None else as_stored(y), *mask)


def forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    activation: Activation,
    save_mask: bool,
) -> tuple[jax.Array, ...]:
    """(y, mean, var) or (y, mean, var, mask)."""
    mean, var = statistics(x)
    y, *mask = normalise(
        x,
        z,
        scale,
        bias,
        mean,
        var,
        epsilon=epsilon,
        activation=activation,
        save_mask=save_mask,
    )
    return (y, mean, var, *mask)


def gated(
    dy: jax.Array,
    centred: jax.Array,
    saved: jax.Array | None,
    a: jax.Array | None,
    bias: jax.Array | None,
    gate: Gate,
) -> jax.Array:
    """e = dy where y > 0, else 0, in the dtype of dy."""
    if gate == "none":
        return dy
    if gate != "x":
        return gated_by_saved(dy, saved, gate)
    assert a is not None
    y = centred * per_element(a, dy)
    if bias is not None:
        y = y + per_element(bias, dy)
    return where_positive(y.astype(dy.dtype) > 0, dy)


def gated_by_saved(dy: jax.Array, saved: jax.Array | None, gate: Gate) -> jax.Array:
    """The same for the gates "y" and "mask"."""
    assert saved is not None
    return where_positive(saved > 0 if gate == "y" else unpack_mask(saved, dy), dy)


@jax.custom_jvp
def _sums_of(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of two arrays over a group, (G, C) each.

    As one operation, they read once what the arrays are computed from. Otherwise, XLA would store e
    to take two sums from it. The derivative is given, because JAX's own is not made of sums.
    """
    return _sums_over(REDUCED)(first, second)


@_sums_of.defjvp
def _sums_of_jvp(arrays: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    first, second = tangents
    return _sums_of(*arrays), (first.sum(axis=REDUCED), second.sum(axis=REDUCED))


@functools.cache
def _sums_over(axes: tuple[int, ...]) -> Any:
    """Sums two arrays over `axes` in one reduction.

    `vmap` makes both results of such a reduction depend on what either of them depends on, so where
    only one of the arrays is mapped, there are two reductions.
    """

    @jax.custom_batching.custom_vmap
    def sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
            return left[0] + right[0], left[1] + right[1]

        zero = jnp.zeros((), first.dtype)
        sum1, sum2 = jax.lax.reduce((first, second), (zero, zero), add, axes)
        return sum1, sum2

    @sums.def_vmap
    def of_mapped(_: int, mapped: list[bool], first: jax.Array, second: jax.Array) -> Any:
        inner = tuple(axis + 1 for axis in axes)  # The mapped axis is the first one.
        if all(mapped):
            return _sums_over(inner)(first, second), (True, True)
        each = zip((first, second), mapped, strict=True)
        return tuple(array.sum(axis=inner if own else axes) for array, own in each), tuple(mapped)

    return sums


def as_stored(y: jax.Array) -> jax.Array:
    """The y of two summands, which is the residual of the next block, as it is after rounding.

    Where y has 16 bits, XLA would store it in float32 as well, unrounded, for those who widen it
    again: the next block, and backward.
    """
    return jax.lax.optimization_barrier(y) if y.dtype.itemsize == 2 else y


def where_positive(positive: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.where(positive, dy, jnp.zeros_like(dy))


def backward_reduce(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    var: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    gate: Gate,
    has_z: bool,
) -> tuple[jax.Array, ...]:
    """(sum(e), sum(e*(x-mean))) of shape (G, C), and dz = e if there is a residual.

    `saved` is y or the mask, depending on `gate`. `var`, `scale` and `bias` are used by gate "x",
    for which y > 0 where scale*(x-mean)*rstd + bias > 0.
    """
    centred = widened(x) - per_element(mean, x)
    a = None if var is None else multiplier(var, scale, epsilon)
    e = gated(dy, centred, saved, a, bias, gate)
    wide = widened(e)
    sums = _sums_of(wide, wide * centred)
    return (*sums, e) if has_z else sums


def backward_coefficients(
    sum_ae: jax.Array,
    sum_ae_normalised: jax.Array,
    rstd: jax.Array,
    dmean: jax.Array,
    dvar: jax.Array,
    *,
    count: jax.Array | int,
) -> Coefficients:
    """b and k of dx. They include the cotangents of mean and var at no further cost.

    `sum_ae` is sum(a*e) and `sum_ae_normalised` is sum(a*e*(x-mean)*rstd), over all elements that
    share mean and var. The factor a = scale*rstd belongs inside the sums, because devices that
    share statistics may have different scales.
    """
    n = jnp.asarray(count, rstd.dtype)
    # One rstd is multiplied at a time: rstd^3 underflows from |x| = 1e13 on, these products do not.
    b = (2 * dvar - rstd * sum_ae_normalised) / n
    k = (dmean - sum_ae) / n
    return Coefficients(b, k)


def read_again(*arrays: jax.Array | None) -> tuple[Any, ...]:
    """The arrays as XLA sees new ones.

    Without this, it would compute e once for both halves of backward and store it: more bytes than
    it takes to compute e from dy and x again, which the second half reads anyway.
    """
    return jax.lax.optimization_barrier(arrays)


def backward_apply(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    b: jax.Array,
    k: jax.Array,
    *,
    epsilon: float,
    gate: Gate,
) -> tuple[jax.Array]:
    """(dx,) with dx = a*e + b*(x-mean) + k, where a = scale*rstd and e as in `backward_reduce`."""
    dy, x, saved = read_again(dy, x, saved)
    a = multiplier(var, scale, epsilon)
    centred = widened(x) - per_element(mean, x)
    e = widened(gated(dy, centred, saved, a, bias, gate))
    dx = per_element(a, x) * e + (per_element(b, x) * centred + per_element(k, x))
    return (dx.astype(x.dtype),)


def backward(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dmean: jax.Array,
    dvar: jax.Array,
    *,
    epsilon: float,
    gate: Gate,
    has_z: bool,
) -> tuple[jax.Array, ...]:
    """(dx, dscale, dbias) or (dx, dscale, dbias, dz); dscale and dbias have shape (G, C)."""
    rstd = reciprocal_std(var, epsilon)
    a = scaled_rstd(rstd, scale)
    given = (dy, x, saved, mean, var, scale, bias)
    dbias, sum_e_centred, *dz = backward_reduce(*given, epsilon=epsilon, gate=gate, has_z=has_z)
    dscale = rstd * sum_e_centred
    count = x.shape[1] * x.shape[3]
    coefficients = backward_coefficients(a * dbias, a * dscale, rstd, dmean, dvar, count=count)
    if dz:  # dz is e, so the gate has already been applied
        dy, saved, gate = dz[0], None, "none"
    given = (dy, x, saved, mean, var, scale, bias)
    (dx,) = backward_apply(*given, *coefficients, epsilon=epsilon, gate=gate)
    return (dx, dscale, dbias, *dz)
