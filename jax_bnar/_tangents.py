"""Tangents of the operators in pure JAX, on canonical arrays: forward mode, and second orders.

With tx, tz, ... the tangents, n elements to a statistics group and a = scale*rstd:

    tmean = sum(tx)/n    tvar = 2*sum((x-mean)*tx)/n
    ty = a*tx + b*(x-mean) + k + tz where y > 0, else 0
    b = rstd*tscale - a*rstd^2*tvar/2    k = tbias - a*tmean

The gate y > 0 comes from the evidence that backward reads, so that ty is the transpose of backward
at the last bit too. A tangent that is None is zero.
"""

import jax
import jax.numpy as jnp

from jax_bnar import reference
from jax_bnar._config import Gate
from jax_bnar._dtypes import accumulation_dtype

_Vector = jax.Array | None


def statistics_tangents(
    x: jax.Array, mean: jax.Array, x_dot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(tmean, tvar) of shape (G, C)."""
    sum_dot, sum_dot_centred = reference.backward_reduce(
        x_dot, x, None, mean, None, None, gate="none", has_residual=False
    )
    n = jnp.asarray(x.shape[1] * x.shape[3], mean.dtype)
    return sum_dot / n, 2 * sum_dot_centred / n


def normalise_tangent(
    x: jax.Array,
    evidence: jax.Array | None,
    scale: _Vector,
    bias: _Vector,
    mean: jax.Array,
    var: jax.Array,
    tangents: tuple[jax.Array | None, jax.Array | None, _Vector, _Vector, _Vector, _Vector],
    *,
    epsilon: float,
    gate: Gate,
) -> jax.Array:
    """ty, in the dtype of x and rounded once; `tangents` are of (x, z, scale, bias, mean, var)."""
    x_dot, z_dot, scale_dot, bias_dot, mean_dot, var_dot = tangents
    rstd = reference.reciprocal_std(var, epsilon)
    a = rstd if scale is None else rstd * jnp.broadcast_to(scale, rstd.shape)
    centred = x.astype(accumulation_dtype(x.dtype)) - _per_element(mean, x)
    b = k = jnp.zeros_like(a)
    if scale_dot is not None:
        b = b + rstd * jnp.broadcast_to(scale_dot, rstd.shape)
    if var_dot is not None:
        b = b - a * rstd * rstd * var_dot / 2
    if bias_dot is not None:
        k = k + jnp.broadcast_to(bias_dot, rstd.shape)
    if mean_dot is not None:
        k = k - a * mean_dot
    y_dot = _per_element(b, x) * centred + _per_element(k, x)
    if x_dot is not None:
        y_dot = y_dot + _per_element(a, x) * x_dot.astype(y_dot.dtype)
    if z_dot is not None:
        y_dot = y_dot + z_dot.astype(y_dot.dtype)
    return reference.gated(y_dot.astype(x.dtype), centred, evidence, a, bias, gate)


def _per_element(vector: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(vector[:, None, :, None], x.shape)
