"""The mathematics of `relu(batch_norm(x1) + batch_norm(x2))` in plain `jax.numpy`.

The functions have the same names, conventions and uses as those of `jax_bnar.reference`. They are
for the operations of `jax_bnar._kernels.dual`.
"""

import jax
import jax.numpy as jnp

from jax_bnar._base.config import Gate
from jax_bnar.reference import (
    REDUCED,
    as_stored,
    backward_coefficients,
    gated_by_saved,
    multiplier,
    pack_mask,
    per_element,
    read_again,
    reciprocal_std,
    scaled_rstd,
    statistics,
    where_positive,
    widened,
)


def sum_of_biases(bias1: jax.Array | None, bias2: jax.Array | None) -> jax.Array | None:
    """The sum of both biases, of shape (G, C) if one of them has that shape, otherwise (1, C)."""
    if bias1 is None or bias2 is None:
        return bias2 if bias1 is None else bias1
    shape = jnp.broadcast_shapes(bias1.shape, bias2.shape)
    return jnp.broadcast_to(bias1, shape) + jnp.broadcast_to(bias2, shape)


def _dual_normalised(
    centred1: jax.Array,
    a1: jax.Array,
    centred2: jax.Array,
    a2: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """(x1-mean1)*a1 + (x2-mean2)*a2 + bias, in the accumulation dtype."""
    y = centred1 * per_element(a1, centred1)
    if bias is not None:
        y = y + per_element(bias, centred1)
    return y + centred2 * per_element(a2, centred2)


def normalise(
    x1: jax.Array,
    x2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    *,
    epsilon: float,
    save_mask: bool,
) -> tuple[jax.Array, ...]:
    """(y,) or (y, mask), with y rounded once, at the end."""
    y = _dual_normalised(
        widened(x1) - per_element(mean1, x1),
        multiplier(var1, scale1, epsilon),
        widened(x2) - per_element(mean2, x2),
        multiplier(var2, scale2, epsilon),
        sum_of_biases(bias1, bias2),
    )
    y = jax.nn.relu(y).astype(x1.dtype)
    mask = (pack_mask(y > 0),) if save_mask else ()
    return (as_stored(y), *mask)


def forward(
    x1: jax.Array,
    x2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    *,
    epsilon: float,
    save_mask: bool,
) -> tuple[jax.Array, ...]:
    """(y, mean1, var1, mean2, var2), followed by the mask if `save_mask` is set."""
    of_both = (*statistics(x1), *statistics(x2))
    y, *mask = normalise(
        *(x1, x2, scale1, bias1, scale2, bias2), *of_both, epsilon=epsilon, save_mask=save_mask
    )
    return (y, *of_both, *mask)


def gated(
    dy: jax.Array,
    saved: jax.Array | None,
    centred1: jax.Array,
    a1: jax.Array | None,
    centred2: jax.Array,
    a2: jax.Array | None,
    bias: jax.Array | None,
    gate: Gate,
) -> jax.Array:
    """e: dy where y > 0 and 0 elsewhere, in the dtype of dy; only gate "x" uses a1, a2 and bias."""
    if gate != "x":
        return gated_by_saved(dy, saved, gate)
    assert a1 is not None
    assert a2 is not None
    y = _dual_normalised(centred1, a1, centred2, a2, bias)
    return where_positive(y.astype(dy.dtype) > 0, dy)


def backward_reduce(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array | None,
    mean2: jax.Array,
    var2: jax.Array | None,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    *,
    epsilon: float,
    gate: Gate,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """sum(e), sum(e*(x1-mean1)) and sum(e*(x2-mean2)), of shape (G, C).

    Only gate "x" uses the variances, scales and biases.
    """
    a1 = None if var1 is None else multiplier(var1, scale1, epsilon)
    a2 = None if var2 is None else multiplier(var2, scale2, epsilon)
    bias = sum_of_biases(bias1, bias2)
    centred1 = widened(x1) - per_element(mean1, x1)
    centred2 = widened(x2) - per_element(mean2, x2)
    e = widened(gated(dy, saved, centred1, a1, centred2, a2, bias, gate))
    # As one operation, XLA:GPU would store all three arrays in float32.
    return (
        e.sum(axis=REDUCED),
        (e * centred1).sum(axis=REDUCED),
        (e * centred2).sum(axis=REDUCED),
    )


def backward_apply(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    b1: jax.Array,
    k1: jax.Array,
    b2: jax.Array,
    k2: jax.Array,
    *,
    epsilon: float,
    gate: Gate,
) -> tuple[jax.Array, jax.Array]:
    """(dx1, dx2), each a*e + b*(x-mean) + k with its own coefficients, where a = scale*rstd."""
    dy, x1, x2, saved = read_again(dy, x1, x2, saved)
    a1, a2 = multiplier(var1, scale1, epsilon), multiplier(var2, scale2, epsilon)
    bias = sum_of_biases(bias1, bias2)
    centred1 = widened(x1) - per_element(mean1, x1)
    centred2 = widened(x2) - per_element(mean2, x2)
    e = widened(gated(dy, saved, centred1, a1, centred2, a2, bias, gate))

    def dx(centred: jax.Array, a: jax.Array, b: jax.Array, k: jax.Array) -> jax.Array:
        wide = per_element(a, e) * e + (per_element(b, e) * centred + per_element(k, e))
        return wide.astype(dy.dtype)

    return dx(centred1, a1, b1, k1), dx(centred2, a2, b2, k2)


def backward(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    dmean1: jax.Array,
    dvar1: jax.Array,
    dmean2: jax.Array,
    dvar2: jax.Array,
    *,
    epsilon: float,
    gate: Gate,
) -> tuple[jax.Array, ...]:
    """(dx1, dx2, dscale1, dscale2, dbias); both biases have the same gradient."""
    rstd1, rstd2 = reciprocal_std(var1, epsilon), reciprocal_std(var2, epsilon)
    a1, a2 = scaled_rstd(rstd1, scale1), scaled_rstd(rstd2, scale2)
    given = (dy, x1, x2, saved, mean1, var1, mean2, var2, scale1, bias1, scale2, bias2)
    dbias, centred1, centred2 = backward_reduce(*given, epsilon=epsilon, gate=gate)
    dscale1, dscale2 = rstd1 * centred1, rstd2 * centred2
    count = x1.shape[1] * x1.shape[3]
    of_x1 = backward_coefficients(a1 * dbias, a1 * dscale1, rstd1, dmean1, dvar1, count=count)
    of_x2 = backward_coefficients(a2 * dbias, a2 * dscale2, rstd2, dmean2, dvar2, count=count)
    dx1, dx2 = backward_apply(*given, *of_x1, *of_x2, epsilon=epsilon, gate=gate)
    return dx1, dx2, dscale1, dscale2, dbias
