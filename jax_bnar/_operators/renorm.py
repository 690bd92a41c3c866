"""Batch renormalization (S. Ioffe, 2017): BatchNorm that is corrected towards running statistics.

    y = act(((x - mean)/std * r + d) * scale + bias + z)
    r = clip(std/running_std, 1/r_max, r_max)
    d = clip((mean - running_mean)/running_std, -d_max, d_max)

where std = sqrt(var + epsilon), and running_std likewise. For derivatives, r and d are constants,
but the statistics are not. With r_max = 1 and d_max = 0 it is BatchNorm.

Since (xhat*r + d)*scale + bias = xhat*(r*scale) + (d*scale + bias), it is BatchNorm with other
parameters, which depend on the statistics and so cannot be known before x was read. Three ways lead
there, with the same first pass, which reads x for the statistics:

- `batch_norm` with these parameters reads x twice more, because it computes the statistics again.
- `batch_norm_inference` with these statistics and parameters reads x once, as needed. But its
  backward knows nothing of how the statistics depend on x: it writes a dx, and the gradient through
  the statistics then reads that and x to write another.
- `training_with_statistics` has that forward pass, and the backward pass of `batch_norm`, whose dx
  has both parts. No array is read or written more often than by BatchNorm in two passes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._autodiff.known_statistics import training_with_statistics
from jax_bnar._autodiff.statistics import batch_statistics
from jax_bnar._base.activations import Activation
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._operators.api import BatchNormResult
from jax_bnar._operators.forms import checked, of_channels
from jax_bnar._operators.named_axes import check_named_axes, names_in_scope
from jax_bnar._operators.validation import check_statistic
from jax_bnar._sharding.alignment import align_operands, with_automatic_axes


def batch_renorm(
    x: Any,
    z: Any,
    scale: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    r_max: Any,
    d_max: Any,
    activation: Activation,
    *,
    negative_slope: float = 0.0,
    epsilon: float,
    axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    num_groups: int,
    save: Save,
    implementation: Implementation,
) -> BatchNormResult:
    """The formula above; with ghost batches, each has its own r and d."""
    function = "BatchRenorm"
    names, groups = check_named_axes(function, axis_name, axis_index_groups)
    ((x,), z, (affine,), layout), config = checked(
        *(function, (x,), z, (Affine(scale, bias),), activation),
        epsilon=epsilon,
        axis=axis,
        num_groups=num_groups,
        save=save,
        implementation=implementation,
        negative_slope=negative_slope,
    )
    running = Statistics(
        check_statistic(function, "mean", running_mean, x, layout.axis),
        check_statistic(function, "var", running_var, x, layout.axis),
    )
    with jax.named_scope(function), names_in_scope(function, axis_name):
        (x, z), (affine, running) = align_operands(layout, (x, z), (affine, running))
        statistics = batch_statistics(x, layout, config.implementation, names, groups)
        corrected = _corrected(affine, statistics, running, r_max, d_max, config.epsilon)
        y = training_with_statistics(x, z, corrected, statistics, config, names, groups)
    return BatchNormResult(y, *of_channels(statistics, layout))


def _corrected(
    affine: Affine,
    statistics: Statistics,
    running: Statistics,
    r_max: Any,
    d_max: Any,
    epsilon: float,
) -> Affine:
    """r*scale and d*scale + bias, each of the shape (num_groups, C) of the statistics."""

    def corrected(
        affine: Affine, statistics: Statistics, running: Statistics, limits: tuple[Any, Any]
    ) -> tuple[jax.Array, jax.Array]:
        shape = statistics.mean.shape
        affine, running, (r_max, d_max) = jax.tree.map(
            lambda array: jnp.broadcast_to(array, shape), (affine, running, limits)
        )
        std, running_std = (
            jnp.sqrt(var + jnp.asarray(epsilon, var.dtype)) for var in (statistics.var, running.var)
        )
        r = jnp.clip(std / running_std, 1 / r_max, r_max)
        d = jnp.clip((statistics.mean - running.mean) / running_std, -d_max, d_max)
        r, d = jax.lax.stop_gradient((r, d))
        if affine.scale is not None:
            r, d = affine.scale * r, affine.scale * d
        return r, d if affine.bias is None else d + affine.bias

    dtype = np.dtype(statistics.mean.dtype)
    limits = tuple(jnp.asarray(limit).astype(dtype) for limit in (r_max, d_max))
    spec = jax.typeof(statistics.mean).sharding.spec
    # The types of the statistics may name shardings of their groups, and those of parameters not.
    return Affine(
        *with_automatic_axes(corrected, (spec, spec), affine, statistics, running, limits)
    )
