"""The mathematics in plain `jax.numpy`, on canonical (G, N, C, S) arrays.

This module is internal and may change without notice: pass `implementation="xla"` to an operator of
`jax_bnar` to compute with it.

There is one function for each operation of `jax_bnar._kernels.kernel_call`, with the same arguments
and results. These functions are used on platforms without a kernel, for `implementation="xla"`, and
for the derivatives of the primitives. Vectors (scale, bias, mean, ...) have shape (G, C) or (1, C)
and the accumulation dtype.

The operator is y = act(sum of batch_norm(x) over its inputs + z), for any number of inputs. What
belongs to an input is in a tuple with one entry for each of them: x, and the pairs `Affine`,
`Statistics` and `Coefficients` of vectors.

Formulas for each input, with n = N*S elements in a statistics group; all inputs share e and dbias:

    mean = sum(x)/n    var = sum((x-mean)^2)/n    rstd = 1/sqrt(var+epsilon)
    u = sum of scale*(x-mean)*rstd + bias over the inputs + z    y = act(u)
    e = dy*act'(u), which for ReLU is dy where y > 0 else 0    dz = e
    dbias = sum(e)    dscale = rstd*sum(e*(x-mean))
    dx = a*e + b*(x-mean) + k

The term (x-mean) must be kept: b*x + k' would lose digits if |mean| >> std.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar._base.activations import CURVES, Activation, activate, is_open
from jax_bnar._base.canonical import mask_bytes
from jax_bnar._base.dtypes import accumulation_dtype, smallest_epsilon
from jax_bnar._base.element_count import element_count
from jax_bnar._base.gates import Gate, recomputes
from jax_bnar._base.inputs import Affine, Coefficients, Statistics
from jax_bnar._base.sums import paired_sums

REDUCED = (1, 3)  # the axes N and S

Arrays = tuple[jax.Array, ...]


def widened(x: jax.Array) -> jax.Array:
    """x in its accumulation dtype."""
    return x.astype(accumulation_dtype(x.dtype))


def per_element(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A (G, C) or (1, C) vector, broadcast to x explicitly (for strict rank promotion)."""
    return jnp.broadcast_to(vector[:, None, :, None], x.shape)


def reciprocal_std(var: jax.Array, epsilon: float) -> jax.Array:
    return jax.lax.rsqrt(var + jnp.asarray(max(epsilon, smallest_epsilon(var.dtype)), var.dtype))


def roots_and_factors(
    statistics: tuple[Statistics, ...], affine: tuple[Affine, ...], epsilon: float
) -> tuple[list[jax.Array], list[jax.Array]]:
    """rstd, and a = scale*rstd, of each input."""
    rstd = [reciprocal_std(of_input.var, epsilon) for of_input in statistics]
    a = [scaled_rstd(own, of_input.scale) for own, of_input in zip(rstd, affine, strict=True)]
    return rstd, a


def scaled_rstd(rstd: jax.Array, scale: jax.Array | None) -> jax.Array:
    """a = scale*rstd; either operand may have a single group that applies to all."""
    return rstd if scale is None else rstd * scale


def sum_of_biases(affine: Sequence[Affine]) -> jax.Array | None:
    """The sum of all biases, of shape (G, C) if one of them has that shape, otherwise (1, C)."""
    biases = [affine_i.bias for affine_i in affine if affine_i.bias is not None]
    if not biases:
        return None
    shape = jnp.broadcast_shapes(*(bias.shape for bias in biases))
    return functools.reduce(jnp.add, (jnp.broadcast_to(bias, shape) for bias in biases))


def centred_inputs(x: Arrays, statistics: Sequence[Statistics]) -> Arrays:
    """x-mean of each input, in the accumulation dtype."""
    return tuple(
        widened(x_i) - per_element(statistics_i.mean, x_i)
        for x_i, statistics_i in zip(x, statistics, strict=True)
    )


def multipliers(
    statistics: Sequence[Statistics], affine: Sequence[Affine], epsilon: float
) -> Arrays:
    """`multiplier` of each input."""
    return tuple(
        multiplier(statistics_i.var, affine_i.scale, epsilon)
        for statistics_i, affine_i in zip(statistics, affine, strict=True)
    )


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


def unpack_mask(mask: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    count = like.size // like.shape[0]
    # A slice, because the argument `count` of unpackbits cannot be symbolic (jax.export).
    bits = jnp.unpackbits(mask, axis=1, bitorder="little")[:, :count]
    return bits.astype(bool).reshape(like.shape)


def statistics(x: jax.Array) -> Statistics:
    """Mean and population variance, (G, C) each, in one pass over x:

        mean = centre + E[x-centre]    var = E[(x-centre)^2] - E[x-centre]^2

    With 0 as the centre, var would be off by 26 % at mean/std = 1000. A centre at a distance of
    s standard deviations from the mean multiplies the rounding errors of the sums by 1 + s^2.
    """
    return statistics_around(x, widened(_centre(x)))


def statistics_around(x: jax.Array, centre: jax.Array) -> Statistics:
    """The same, with a centre that is given, of shape (G, C)."""
    wide = widened(x)
    # Derivatives flow through the sums only, because mean and var do not depend on the centre.
    centred = wide - per_element(centre, x)
    offset = centred.mean(axis=REDUCED)
    var = jnp.square(centred).mean(axis=REDUCED) - jnp.square(offset)
    # Rounding may make the difference negative; `where` keeps a NaN.
    return Statistics(centre + offset, jnp.where(var < 0, jnp.zeros_like(var), var))


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
    x = _within_indices(jax.lax.stop_gradient(x))
    rows, inner = x.shape[1], x.shape[3]
    sample = x[:, _spread(rows, _ROW_STEP), :, _spread(inner, _INNER_STEP)]  # (27, G, C)
    while sample.shape[0] > 1:
        a, b, c = jnp.split(sample, 3)
        low, high = jnp.minimum(a, b), jnp.maximum(a, b)
        sample = jnp.maximum(low, jnp.minimum(high, c))
    centre = sample[0]
    # Relative to an infinity, the mean would be a NaN.
    return jnp.where(jnp.isfinite(centre), centre, jnp.zeros_like(centre))


def _within_indices(x: jax.Array) -> jax.Array:
    """The part of x whose elements have indices of 32 bits, which JAX's have without x64."""
    most = 2**30
    for axis in (1, 3):
        size = x.shape[axis]
        if isinstance(size, int) and size > most:
            x = jax.lax.slice_in_dim(x, 0, most, axis=axis)
    return x


def _spread(size: int, step: float) -> jax.Array:
    """Indices below `size`, which may be symbolic (jax.export)."""
    unit = 2**15  # The products below fit into 32 bits.
    fractions = [int((k + 0.5) * step * unit) % unit for k in range(_SAMPLES)]
    # The integer part of size * fraction / unit.
    return jnp.asarray([size // unit * f + size % unit * f // unit for f in fractions])


def normalise(
    x: Arrays,
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    statistics: tuple[Statistics, ...],
    *,
    epsilon: float,
    activation: Activation = "relu",
    negative_slope: float = 0.0,
    save_mask: bool,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, mask), computed in the accumulation dtype and rounded once, at the end.

    The mask is None unless `save_mask` is set. y has the dtype `out_dtype`, or that of x.
    """
    y = _normalised(
        centred_inputs(x, statistics),
        multipliers(statistics, affine, epsilon),
        sum_of_biases(affine),
    )
    if z is not None:
        y = y + widened(z)
    y = activate(y, activation, negative_slope).astype(out_dtype or x[0].dtype)
    mask = pack_mask(is_open(y, activation)) if save_mask else None
    return y if z is None and len(x) == 1 else as_stored(y), mask


def _normalised(centred: Arrays, a: Arrays, bias: jax.Array | None) -> jax.Array:
    """The sum of centred*a over the inputs, and the bias, in the accumulation dtype."""
    y, *others = (
        centred_i * per_element(a_i, centred_i) for centred_i, a_i in zip(centred, a, strict=True)
    )
    if bias is not None:
        y = y + per_element(bias, y)
    return functools.reduce(jnp.add, others, y)


def forward(
    x: Arrays,
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    *,
    epsilon: float,
    activation: Activation = "relu",
    negative_slope: float = 0.0,
    save_mask: bool,
    out_dtype: Any = None,
) -> tuple[jax.Array, tuple[Statistics, ...], jax.Array | None]:
    """(y, statistics, mask); the mask is None unless `save_mask` is set."""
    of_batch = tuple(map(statistics, x))
    y, mask = normalise(
        x,
        z,
        affine,
        of_batch,
        epsilon=epsilon,
        activation=activation,
        negative_slope=negative_slope,
        save_mask=save_mask,
        out_dtype=out_dtype,
    )
    return y, of_batch, mask


def gated(
    dy: jax.Array,
    centred: Arrays,
    saved: jax.Array | None,
    a: Arrays | None,
    bias: jax.Array | None,
    gate: Gate,
    *,
    dtype: Any,
    activation: Activation = "relu",
    negative_slope: float = 0.0,
) -> jax.Array:
    """e = dy*act'(u): for ReLU dy where y > 0, else 0, in the dtype of dy.

    For other activations, e is in the accumulation dtype. `bias` is the sum of all biases. Only
    gates "x" and "z" use it and a. `dtype` is that of y.
    """
    if gate == "none":
        return dy
    if activation in CURVES:
        u = _unactivated(centred, saved, a, bias, gate, activation, dtype)
        return times_derivative(dy, u, activation, negative_slope)
    if gate == "x":
        assert a is not None
        y = _normalised(centred, a, bias)
        return where_positive(y.astype(dtype) > 0, dy)
    assert saved is not None
    return where_positive(saved > 0 if gate == "y" else unpack_mask(saved, dy), dy)


def times_derivative(
    dy: jax.Array, u: jax.Array, activation: Activation, negative_slope: float
) -> jax.Array:
    """e = dy*act'(u) of an activation in `CURVES`, in the accumulation dtype."""
    derivative = CURVES[activation].derivative(u, negative_slope)
    e = widened(dy) * derivative
    return where_positive(derivative != 0, e) if CURVES[activation].selects else e


def _unactivated(
    centred: Arrays,
    saved: jax.Array | None,
    a: Arrays | None,
    bias: jax.Array | None,
    gate: Gate,
    activation: Activation,
    dtype: Any,
) -> jax.Array:
    """What act' has the same value for as for u, in the accumulation dtype."""
    if recomputes(gate):
        assert a is not None
        u = _normalised(centred, a, bias)
        if gate == "z":
            assert saved is not None
            u = u + widened(saved)
        if CURVES[activation].is_open is None:
            return u
        # Where y may be saved instead, the derivative is that of the rounded value. In y, what is
        # below 0 has kept its sign, and 0 has none.
        return widened(jnp.where(u == 0, jnp.zeros_like(u), u).astype(dtype))
    assert saved is not None
    if gate == "y":
        return widened(saved)
    one = jnp.ones_like(centred[0])
    return jnp.where(unpack_mask(saved, one), one, -one)


def as_stored(y: jax.Array) -> jax.Array:
    """The y of several summands, which is the residual of the next block, as it is after rounding.

    Where y has 16 bits, XLA would store it in float32 as well, unrounded, for those who widen it
    again: the next block, and backward.
    """
    return jax.lax.optimization_barrier(y) if y.dtype.itemsize == 2 else y


def where_positive(positive: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.where(positive, dy, jnp.zeros_like(dy))


def backward_reduce(
    dy: jax.Array,
    x: Arrays,
    saved: jax.Array | None,
    statistics: tuple[Statistics, ...],
    affine: tuple[Affine, ...],
    *,
    epsilon: float,
    gate: Gate,
    has_z: bool = False,
    **activation: Any,
) -> tuple[jax.Array, Arrays, jax.Array | None]:
    """sum(e), sum(e*(x-mean)) of each input, of shape (G, C), and dz = e if there is a residual.

    `saved` is y, the mask or z, by `gate`. `var`, `scale` and `bias` are used by the gates "x"
    and "z", which compute u again; for the other gates they may be None. `activation` may hold
    `activation` and `negative_slope`, as in forward.
    """
    centred = centred_inputs(x, statistics)
    a = multipliers(statistics, affine, epsilon) if recomputes(gate) else None
    bias = sum_of_biases(affine)
    e = gated(dy, centred, saved, a, bias, gate, dtype=dy.dtype, **activation)
    wide = widened(e)
    dz = e.astype(dy.dtype) if has_z else None
    if len(x) == 1:
        sum_e, sum_e_centred = paired_sums(wide, wide * centred[0], REDUCED)
        return sum_e, (sum_e_centred,), dz
    # As one operation, XLA:GPU would store all arrays that are summed in float32.
    return wide.sum(axis=REDUCED), tuple((wide * c).sum(axis=REDUCED) for c in centred), dz


def backward_coefficients(
    sum_ae: jax.Array,
    sum_ae_normalised: jax.Array,
    rstd: jax.Array,
    dmean: jax.Array,
    dvar: jax.Array,
    *,
    count: jax.Array,
) -> Coefficients:
    """b and k of dx. They include the cotangents of mean and var at no further cost.

    `sum_ae` is sum(a*e) and `sum_ae_normalised` is sum(a*e*(x-mean)*rstd), over all elements that
    share mean and var. The factor a = scale*rstd belongs inside the sums, because devices that
    share statistics may have different scales.
    """
    # One rstd is multiplied at a time: rstd^3 underflows from |x| = 1e13 on, these products do not.
    b = (2 * dvar - rstd * sum_ae_normalised) / count
    k = (dmean - sum_ae) / count
    return Coefficients(b, k)


def read_again(*arrays: Any) -> tuple[Any, ...]:
    """The arrays as XLA sees new ones.

    Without this, it would compute e once for both halves of backward and store it: more bytes than
    it takes to compute e from dy and x again, which the second half reads anyway.
    """
    # A barrier for each array: with one for all of them, jax 0.12 cannot transpose a derivative in
    # which some of the arrays are constants.
    return jax.tree.map(jax.lax.optimization_barrier, arrays)


def backward_apply(
    dy: jax.Array,
    x: Arrays,
    saved: jax.Array | None,
    statistics: tuple[Statistics, ...],
    affine: tuple[Affine, ...],
    coefficients: tuple[Coefficients, ...],
    *,
    epsilon: float,
    gate: Gate,
    **activation: Any,
) -> Arrays:
    """dx = a*e + b*(x-mean) + k of each input, a = scale*rstd and e as in `backward_reduce`."""
    if gate != "none":  # Otherwise e is dy, which nobody computes.
        dy, x, saved = read_again(dy, x, saved)
    a = multipliers(statistics, affine, epsilon)
    centred = centred_inputs(x, statistics)
    bias = sum_of_biases(affine)
    e = widened(gated(dy, centred, saved, a, bias, gate, dtype=dy.dtype, **activation))
    dx = (
        per_element(a_i, e) * e + (per_element(of_i.b, e) * centred_i + per_element(of_i.k, e))
        for a_i, centred_i, of_i in zip(a, centred, coefficients, strict=True)
    )
    return tuple(dx_i.astype(x_i.dtype) for dx_i, x_i in zip(dx, x, strict=True))


def backward(
    dy: jax.Array,
    x: Arrays,
    saved: jax.Array | None,
    statistics: tuple[Statistics, ...],
    affine: tuple[Affine, ...],
    cotangents: tuple[Statistics, ...],
    *,
    epsilon: float,
    gate: Gate,
    has_z: bool = False,
    **activation: Any,
) -> tuple[Arrays, Arrays, jax.Array, jax.Array | None]:
    """(dx, dscale, dbias, dz), with dz None unless there is a residual.

    `cotangents` are those of mean and var. dscale and dbias have shape (G, C); all biases have the
    same gradient.
    """
    given = (dy, x, saved, statistics, affine)
    dbias, centred, dz = backward_reduce(
        *given, epsilon=epsilon, gate=gate, has_z=has_z, **activation
    )
    rstd, a = roots_and_factors(statistics, affine, epsilon)
    dscale = tuple(rstd_i * sum_i for rstd_i, sum_i in zip(rstd, centred, strict=True))
    _, rows, _, inner = x[0].shape
    count = element_count(rows, inner, dtype=rstd[0].dtype)
    coefficients = tuple(
        backward_coefficients(a_i * dbias, a_i * dscale_i, rstd_i, dmean, dvar, count=count)
        for rstd_i, a_i, dscale_i, (dmean, dvar) in zip(rstd, a, dscale, cotangents, strict=True)
    )
    if dz is not None:  # dz is e, so the gate has already been applied
        e, x = read_again(dz, x)
        given, gate = (e, x, None, statistics, affine), "none"
    dx = backward_apply(*given, coefficients, epsilon=epsilon, gate=gate, **activation)
    return dx, dscale, dbias, dz
