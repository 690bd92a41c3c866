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

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_bnar._base.canonical import mask_bytes
from jax_bnar._base.config import Activation, Gate
from jax_bnar._base.dtypes import accumulation_dtype, smallest_epsilon

REDUCED = (1, 3)  # the axes N and S


class Coefficients(NamedTuple):
    """dx = a*e + b*(x-mean) + k, each of shape (G, C)."""

    a: jax.Array
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
    """Mean and population variance, (G, C) each.

    This takes two passes, because E[x^2]-E[x]^2 is off by 26 % at mean/std = 1000. The first pass
    sums differences from one element of the channel. Its mean is rounded, and less accurate still
    if that element is an outlier. The second pass sums differences from that mean, and their
    squares, and corrects the mean, whatever the order of the elements. (This is the corrected
    two-pass algorithm of Chan, Golub and LeVeque, 1983.)
    """
    wide = widened(x)
    first = _finite_or(wide[:, :1, :, :1], 0)
    # Relative to an element, so that the mean of a constant channel is exactly its value.
    offset = (wide - jnp.broadcast_to(first, x.shape)).mean(axis=REDUCED, keepdims=True)
    centre = first + _coarse(offset)
    # Derivatives flow through the correction only, because the mean does not depend on the centre.
    # An infinite centre is replaced, because Inf-Inf would turn the mean into a NaN.
    centre = jax.lax.stop_gradient(jnp.where(jnp.isfinite(centre), centre, first))
    centred = wide - jnp.broadcast_to(centre, x.shape)
    correction = centred.mean(axis=REDUCED)
    var = jnp.square(centred).mean(axis=REDUCED) - jnp.square(correction)
    # Rounding may make the difference negative; `where` keeps a NaN.
    return centre[:, 0, :, 0] + correction, jnp.where(var < 0, jnp.zeros_like(var), var)


def _coarse(values: jax.Array) -> jax.Array:
    """The values with their last 12 bits cleared.

    XLA may compute the centre in several places, and in some of them it would contract the mean's
    final multiplication with the addition that follows into a fused multiply-add. The centres would
    then differ, and the correction is valid for one of them only. Clearing bits in between prevents
    the contraction.
    """
    values = jax.lax.stop_gradient(values)
    integer = jnp.uint64 if values.dtype.itemsize == 8 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(values, integer)
    last = jnp.asarray(4095, integer)
    return jax.lax.bitcast_convert_type(bits & ~last, values.dtype)


def _finite_or(values: jax.Array, otherwise: float) -> jax.Array:
    return jax.lax.stop_gradient(
        jnp.where(jnp.isfinite(values), values, jnp.full_like(values, otherwise))
    )


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
    rstd = reciprocal_std(var, epsilon)
    y = (widened(x) - per_element(mean, x)) * per_element(scaled_rstd(rstd, scale), x)
    if bias is not None:
        y = y + per_element(bias, x)
    if z is not None:
        y = y + widened(z)
    if activation == "relu":
        y = jax.nn.relu(y)
    y = y.astype(x.dtype)
    return (y, pack_mask(y > 0)) if save_mask else (y,)


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


def where_positive(positive: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.where(positive, dy, jnp.zeros_like(dy))


def backward_reduce(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    a: jax.Array | None,
    bias: jax.Array | None,
    *,
    gate: Gate,
    has_z: bool,
) -> tuple[jax.Array, ...]:
    """(sum(e), sum(e*(x-mean))) of shape (G, C), and dz = e if there is a residual.

    `saved` is y or the mask, depending on `gate`. `a` and `bias` are used by gate "x", for which
    y > 0 where (x-mean)*a + bias > 0.
    """
    centred = widened(x) - per_element(mean, x)
    e = gated(dy, centred, saved, a, bias, gate)
    wide = widened(e)
    sums = wide.sum(axis=REDUCED), (wide * centred).sum(axis=REDUCED)
    return (*sums, e) if has_z else sums


def backward_coefficients(
    sum_ae: jax.Array,
    sum_ae_normalised: jax.Array,
    a: jax.Array,
    rstd: jax.Array,
    dmean: jax.Array,
    dvar: jax.Array,
    *,
    count: jax.Array | int,
) -> Coefficients:
    """The coefficients of dx. They include the cotangents of mean and var at no further cost.

    `sum_ae` is sum(a*e) and `sum_ae_normalised` is sum(a*e*(x-mean)*rstd), over all elements that
    share mean and var. The factor a = scale*rstd belongs inside the sums, because devices that
    share statistics may have different scales.
    """
    n = jnp.asarray(count, rstd.dtype)
    # One rstd is multiplied at a time: rstd^3 underflows from |x| = 1e13 on, these products do not.
    b = (2 * dvar - rstd * sum_ae_normalised) / n
    k = (dmean - sum_ae) / n
    return Coefficients(a, b, k)


def backward_apply(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    a: jax.Array,
    b: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    *,
    gate: Gate,
) -> tuple[jax.Array]:
    """(dx,) with dx = a*e + b*(x-mean) + k, and e as in `backward_reduce`."""
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
    dbias, sum_e_centred, *dz = backward_reduce(dy, x, saved, mean, a, bias, gate=gate, has_z=has_z)
    dscale = rstd * sum_e_centred
    count = x.shape[1] * x.shape[3]
    coefficients = backward_coefficients(a * dbias, a * dscale, a, rstd, dmean, dvar, count=count)
    (dx,) = backward_apply(dy, x, saved, mean, *coefficients, bias, gate=gate)
    return (dx, dscale, dbias, *dz)
