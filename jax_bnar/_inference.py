"""Inference form, in the user's layout: given mean and var, with its gradient (fine-tuning)."""

import jax
import jax.numpy as jnp

from jax_bnar import _operations, reference
from jax_bnar._config import Config

_Vector = jax.Array | None
_Residuals = tuple[jax.Array, jax.Array | None, _Vector, _Vector, jax.Array, jax.Array]


def _normalise(
    x: jax.Array,
    z: jax.Array | None,
    scale: _Vector,
    bias: _Vector,
    mean: jax.Array,
    var: jax.Array,
    config: Config,
) -> jax.Array:
    (y,) = _operations.normalise(
        x,
        z,
        scale,
        bias,
        mean,
        var,
        layout=config.layout,
        implementation=config.implementation,
        epsilon=config.epsilon,
        activation=config.activation,
        save_mask=False,
    )
    return y


def _inference(
    x: jax.Array,
    z: jax.Array | None,
    scale: _Vector,
    bias: _Vector,
    mean: jax.Array,
    var: jax.Array,
    config: Config,
) -> jax.Array:
    """y of x; scale, bias, mean and var of shape (1, C)."""
    return _normalise(x, z, scale, bias, mean, var, config)


def _inference_forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: _Vector,
    bias: _Vector,
    mean: jax.Array,
    var: jax.Array,
    config: Config,
) -> tuple[jax.Array, _Residuals]:
    y = _normalise(x, z, scale, bias, mean, var, config)
    return y, (x, None if config.activation == "none" else y, scale, bias, mean, var)


def _inference_backward(
    config: Config, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array | None, ...]:
    """mean and var are constants of the normalisation, so dx = scale*rstd*e, and

    dmean = -scale*rstd*sum(e)    dvar = -scale*rstd^3/2 * sum(e*(x-mean)).
    """
    x, evidence, scale, bias, mean, var = residuals
    # Not "x": this `a` and the kernel's may differ in the last bit, and so might a sign.
    gate = "none" if config.activation == "none" else "y"
    rstd = reference.reciprocal_std(var, config.epsilon)
    a = rstd if scale is None else scale * rstd
    sum_e, sum_e_centred, *dz = _operations.backward_reduce(
        dy,
        x,
        evidence,
        mean,
        None,
        None,
        layout=config.layout,
        implementation=config.implementation,
        gate=gate,
        has_residual=config.has_residual,
    )
    zero = jnp.zeros_like(a)
    (dx,) = _operations.backward_apply(
        dy,
        x,
        evidence,
        mean,
        a,
        zero,
        zero,
        None,
        layout=config.layout,
        implementation=config.implementation,
        gate=gate,
    )
    return (
        dx,
        dz[0] if dz else None,
        None if scale is None else rstd * sum_e_centred,
        None if bias is None else sum_e,
        -a * sum_e,
        -a * rstd * rstd * sum_e_centred / 2,
    )


inference = jax.custom_vjp(_inference, nondiff_argnums=(6,))
inference.defvjp(_inference_forward, _inference_backward)
