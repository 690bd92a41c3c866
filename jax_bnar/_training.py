"""Training form on arrays in the user's layout, with its gradient."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_bnar import _operations
from jax_bnar._config import Config

# Names for jax.checkpoint policies such as save_only_these_names.
STATISTICS_NAME = "bnar_statistics"
MASK_NAME = "bnar_mask"

_Vector = jax.Array | None
_Residuals = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array, _Vector, _Vector]


def _forward(
    x: jax.Array, z: jax.Array | None, scale: _Vector, bias: _Vector, config: Config, save: bool
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
    y, mean, var, *mask = _operations.forward(
        x,
        z,
        scale,
        bias,
        layout=config.layout,
        implementation=config.implementation,
        epsilon=config.epsilon,
        activation=config.activation,
        save_mask=save and config.save_mask,
    )
    return (y, mean, var), mask[0] if mask else None


def _training(
    x: jax.Array, z: jax.Array | None, scale: _Vector, bias: _Vector, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(y, mean, var) of x; mean and var of shape (num_groups, C)."""
    results, _ = _forward(x, z, scale, bias, config, save=False)
    return results


def _training_forward(
    x: jax.Array, z: jax.Array | None, scale: _Vector, bias: _Vector, config: Config
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], _Residuals]:
    (y, mean, var), mask = _forward(x, z, scale, bias, config, save=True)
    # Named before use, so that a policy which saves them cuts the recomputation here.
    mean = checkpoint_name(mean, STATISTICS_NAME)
    var = checkpoint_name(var, STATISTICS_NAME)
    evidence = None
    if config.gate == "y":
        # Not the pre-ReLU tensor: y is the output and lives on anyway (Hou's post on this fusion).
        evidence = y
    elif config.gate == "mask":
        evidence = checkpoint_name(mask, MASK_NAME)
    return (y, mean, var), (x, evidence, mean, var, scale, bias)


def _training_backward(
    config: Config, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None, _Vector, _Vector]:
    x, evidence, mean, var, scale, bias = residuals
    dy, dmean, dvar = cotangents
    dx, dscale, dbias, *dz = _operations.backward(
        dy,
        x,
        evidence,
        mean,
        var,
        scale,
        bias,
        dmean,
        dvar,
        layout=config.layout,
        implementation=config.implementation,
        epsilon=config.epsilon,
        gate=config.gate,
        has_residual=config.has_residual,
    )
    return (
        dx,
        dz[0] if dz else None,
        None if scale is None else dscale.sum(axis=0, keepdims=True),
        None if bias is None else dbias.sum(axis=0, keepdims=True),
    )


training = jax.custom_vjp(_training, nondiff_argnums=(4,))
training.defvjp(_training_forward, _training_backward)
