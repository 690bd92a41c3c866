"""The training form in the user's layout, with its derivatives.

It is not a `jax.custom_vjp`, which would not support forward mode. It is a `jax.custom_jvp` whose
tangent is one linear primitive with our backward as its transpose. This has the same residuals and
the same two kernels as a custom_vjp, and supports `jax.jvp`, `jax.linearize` and `jax.jacfwd` as
well; see `linear_call`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.remat import MASK_NAME, STATISTICS_NAME, recomputable
from jax_bnar._autodiff.tangents import mapped_tangents, training_tangents
from jax_bnar._base.config import Config

# x, saved (as selected by `save=`), mean, var, scale, bias
_Residuals = tuple[
    jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array | None, jax.Array | None
]
# y, mean, var, mask
_Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def training(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    config: Config,
    save_mask: bool = False,
) -> _Results:
    """Returns (y, mean, var, mask); mean and var have shape (num_groups, C).

    mask is None unless `save_mask` is set. All operands must vary over the same mesh axes
    (`jax_bnar._sharding.alignment`).
    """
    y, mean, var, *mask = primitive.forward(
        x, z, scale, bias, **config.forward_statics(save_mask=save_mask)
    )
    return y, mean, var, mask[0] if mask else None


@functools.partial(training.defjvp, symbolic_zeros=True)
def _training_jvp(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    """The residuals are those passed to `linear_call`: x, saved, mean, var, scale, bias."""
    x, z, scale, bias = primals
    results, residuals = _forward(x, z, scale, bias, config, save_mask or config.save_mask)
    y, mean, var, mask = results
    moving = tuple(None if isinstance(t, SymbolicZero) else t for t in tangents)
    dots = linear_call(_TrainingTangent(config), residuals, moving, (y, mean, var))
    # The mask is returned only if the caller asked for it, which happens in second derivatives.
    mask = mask if save_mask else None
    return (y, mean, var, mask), (*dots, zero_from_primal(mask, symbolic_zeros=True))


def _forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    config: Config,
    save_mask: bool,
) -> tuple[_Results, _Residuals]:
    # This calls `training` rather than the primitive, so that second derivatives use the rule
    # above.
    y, mean, var, mask = training(x, z, scale, bias, config, save_mask)
    # They are named before their first use, so that a policy that saves them ends the
    # recomputation here.
    mean = checkpoint_name(mean, STATISTICS_NAME)
    var = checkpoint_name(var, STATISTICS_NAME)
    operands = (x, z, scale, bias, mean, var)
    statics = config.forward_statics(save_mask=save_mask)
    y, *masks = recomputable(y, mask, *operands, **statics)
    saved = mask = None
    if masks:
        mask = checkpoint_name(masks[0], MASK_NAME)
    if config.gate == "y":
        # y instead of the pre-ReLU tensor: y is the output and is kept anyway (K. Hou's post).
        saved = y
    elif config.gate == "mask":
        saved = mask
    return (y, mean, var, mask), (x, saved, mean, var, scale, bias)


@dataclasses.dataclass(frozen=True)
class _TrainingTangent(LocalMap):
    """The linear map from the tangents of (x, z, scale, bias) to those of (y, mean, var)."""

    config: Config

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return mapped_tangents(residuals, tangents)

    def tangent(
        self, residuals: _Residuals, tangents: tuple[jax.Array | None, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return training_tangents(residuals, tangents, self.config)

    def transpose(
        self, residuals: _Residuals, cotangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
        return transposed(primitive.backward, residuals, cotangents, self.config)


def transposed(
    backward: Callable[..., tuple[jax.Array, ...]],
    residuals: _Residuals,
    cotangents: tuple[jax.Array, ...],
    config: Config,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Cotangents of (x, z, scale, bias) by `backward`; None for an operand that is None."""
    *_, scale, bias = residuals
    dy, dmean, dvar = cotangents
    dx, dscale, dbias, *dz = backward(
        dy, *residuals, dmean, dvar, **config.backward_statics, **options
    )
    return (
        dx,
        dz[0] if dz else None,
        None if scale is None else dscale.sum(axis=0, keepdims=True),
        None if bias is None else dbias.sum(axis=0, keepdims=True),
    )
