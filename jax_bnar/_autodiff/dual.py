"""relu(batch_norm(x1) + batch_norm(x2)) in the user's layout, with its derivatives.

The training form and the inference form are built like those with one input; see the modules
`training` and `inference`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jax_bnar import primitive, reference
from jax_bnar._autodiff import dual_tangents
from jax_bnar._autodiff.dual_tangents import Residuals, Tangents
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.remat import MASK_NAME, STATISTICS_NAME, dual_recomputable
from jax_bnar._base.config import Config, Gate

# y, mean1, var1, mean2, var2, mask
_Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(6, 7))
def training(
    x1: jax.Array,
    x2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    config: Config,
    save_mask: bool = False,
) -> _Results:
    """Returns (y, mean1, var1, mean2, var2, mask); the statistics have shape (num_groups, C).

    mask is None unless `save_mask` is set. All operands must vary over the same mesh axes
    (`jax_bnar._sharding.alignment`).
    """
    y, mean1, var1, mean2, var2, *mask = primitive.dual_forward(
        *(x1, x2, scale1, bias1, scale2, bias2),
        **config.dual_forward_statics(save_mask=save_mask),
    )
    return y, mean1, var1, mean2, var2, mask[0] if mask else None


@functools.partial(training.defjvp, symbolic_zeros=True)
def _training_jvp(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    """The same rule as for one input; see `jax_bnar._autodiff.training`."""
    results, residuals = _forward(primals, config, save_mask or config.save_mask)
    *floats, mask = results
    moving = tuple(None if isinstance(t, SymbolicZero) else t for t in tangents)
    dots = linear_call(_TrainingTangent(config), residuals, moving, tuple(floats))
    # The mask is returned only to a caller that asked for it, which differentiates a derivative.
    mask = mask if save_mask else None
    y, mean1, var1, mean2, var2 = floats
    return (y, mean1, var1, mean2, var2, mask), (*dots, zero_from_primal(mask, symbolic_zeros=True))


def _forward(
    operands: tuple[Any, ...], config: Config, save_mask: bool
) -> tuple[_Results, Residuals]:
    # This calls `training`, not the primitive, so that a derivative of the derivative uses the rule
    # above again.
    y, *statistics, mask = training(*operands, config, save_mask)
    # The statistics are named before they are used, so that under a policy which saves them the
    # recomputation stops here.
    mean1, var1, mean2, var2 = (checkpoint_name(v, STATISTICS_NAME) for v in statistics)
    statics = config.dual_forward_statics(save_mask=save_mask)
    y, *masks = dual_recomputable(y, mask, *operands, mean1, var1, mean2, var2, **statics)
    mask = checkpoint_name(masks[0], MASK_NAME) if masks else None
    saved = mask if config.gate == "mask" else None
    x1, x2, *affine = operands
    results = (y, mean1, var1, mean2, var2, mask)
    return results, (x1, x2, saved, mean1, var1, mean2, var2, *affine)


@dataclasses.dataclass(frozen=True)
class _TrainingTangent(LocalMap):
    """Maps tangents of (x1, x2, scale1, bias1, scale2, bias2) to those of y and the statistics."""

    config: Config

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return dual_tangents.mapped_tangents(residuals, tangents)

    def tangent(self, residuals: Residuals, tangents: Tangents) -> tuple[jax.Array, ...]:
        return dual_tangents.training_tangents(residuals, tangents, self.config)

    def transpose(
        self, residuals: Residuals, cotangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array | None, ...]:
        return transposed(primitive.dual_backward, residuals, cotangents, self.config)


def transposed(
    backward: Callable[..., tuple[jax.Array, ...]],
    residuals: Residuals,
    cotangents: tuple[jax.Array, ...],
    config: Config,
    **options: Any,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of (x1, x2, scale1, bias1, scale2, bias2), computed by `backward`."""
    *_, scale1, bias1, scale2, bias2 = residuals
    dy, *of_statistics = cotangents
    dx1, dx2, dscale1, dscale2, dbias = backward(
        dy, *residuals, *of_statistics, **config.dual_backward_statics, **options
    )

    # Both biases have this one gradient, which is summed over the groups once.
    dscale1, dscale2, dbias = (d.sum(axis=0, keepdims=True) for d in (dscale1, dscale2, dbias))
    return (
        *(dx1, dx2),
        *(None if scale1 is None else dscale1, None if bias1 is None else dbias),
        *(None if scale2 is None else dscale2, None if bias2 is None else dbias),
    )


# --- inference ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(10,))
def inference(
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
    config: Config,
) -> jax.Array:
    """Returns y, from given statistics of shape (1, C).

    All operands must vary over the same mesh axes (`jax_bnar._sharding.alignment`).
    """
    return primitive.dual_inference(
        *(x1, x2, scale1, bias1, scale2, bias2, mean1, var1, mean2, var2),
        **config.dual_inference_statics,
    )


@functools.partial(inference.defjvp, symbolic_zeros=True)
def _inference_jvp(
    config: Config, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    y = inference(*primals, config)
    moving = tuple(None if isinstance(t, SymbolicZero) else t for t in tangents)
    (y_dot,) = linear_call(_InferenceTangent(config), (y, primals), moving, (y,))
    return y, y_dot


@dataclasses.dataclass(frozen=True)
class _InferenceTangent(LocalMap):
    """Maps tangents of the operands of `inference` to that of y.

    The residuals are y and the operands.
    """

    config: Config

    # Gate "x" would be wrong, see `jax_bnar._autodiff.inference`.
    gate: Gate = "y"

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return (any(jax.tree.leaves((residuals, tangents))),)

    def tangent(self, residuals: Any, tangents: Tangents) -> tuple[jax.Array]:
        y, operands = residuals
        y_dot = dual_tangents.normalise_tangent(
            y,
            operands,
            tangents,
            layout=self.config.layout,
            epsilon=self.config.epsilon,
            gate=self.gate,
        )
        return (y_dot,)

    def transpose(
        self, residuals: Any, cotangents: tuple[jax.Array]
    ) -> tuple[jax.Array | None, ...]:
        """As for one input, but both inputs share the gated cotangent e."""
        y, (x1, x2, scale1, bias1, scale2, bias2, mean1, var1, mean2, var2) = residuals
        (dy,) = cotangents
        arrays = (dy, x1, x2, y)
        options: dict[str, Any] = self.config.dual_backward_statics | {"gate": self.gate}
        sum_e, *centred = primitive.dual_backward_reduce(
            *(*arrays, mean1, None, mean2, None, None, None, None, None), **options
        )
        rstd = [reference.reciprocal_std(var, self.config.epsilon) for var in (var1, var2)]
        a1, a2 = map(reference.scaled_rstd, rstd, (scale1, scale2))
        zero1, zero2 = jnp.zeros_like(a1), jnp.zeros_like(a2)
        dx1, dx2 = primitive.dual_backward_apply(
            *(*arrays, mean1, var1, mean2, var2, scale1, None, scale2, None),
            *(zero1, zero1, zero2, zero2),
            **options,
        )
        dvar1, dvar2 = (
            -a * (r * (r * (c / 2)))  # rstd^3 may underflow
            for a, r, c in zip((a1, a2), rstd, centred, strict=True)
        )
        return (
            *(dx1, dx2),
            None if scale1 is None else rstd[0] * centred[0],
            None if bias1 is None else sum_e,
            None if scale2 is None else rstd[1] * centred[1],
            None if bias2 is None else sum_e,
            *(-a1 * sum_e, dvar1, -a2 * sum_e, dvar2),
        )
