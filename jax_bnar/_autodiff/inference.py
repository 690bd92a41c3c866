"""The inference form (given mean and var) in the user's layout, with its derivatives.

Operands are (x, z, affine, statistics), and what belongs to the inputs is in tuples; see
`jax_bnar._base.inputs`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal

from jax_bnar import primitive, reference
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.tangents import Residuals, normalise_tangent
from jax_bnar._autodiff.training import moving
from jax_bnar._base.config import Config
from jax_bnar._base.gates import recomputes
from jax_bnar._base.inputs import Affine, Coefficients, Statistics, read_by_gate
from jax_bnar.plain_inference import given_or_neutral

_Results = tuple[jax.Array, jax.Array | None]  # y, mask


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def inference(
    x: tuple[jax.Array, ...],
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    statistics: tuple[Statistics, ...],
    config: Config,
    save_mask: bool = False,
) -> _Results:
    """Returns (y, mask); scale, bias, mean and var have shape (1, C).

    mask is None unless `save_mask` is set. If mean and var are None, y = act(x + bias + z); scale
    is None too then, and epsilon is `jax_bnar.plain_inference.NEUTRAL_EPSILON`. All operands must
    vary over the same mesh axes (`jax_bnar._sharding.alignment`).
    """
    operations, operands = primitive.OPERATIONS[config.inputs], (x, z, affine, statistics)
    if not save_mask:
        return operations.inference(*operands, **config.inference_statics), None
    return operations.normalise(*operands, **config.forward_statics(save_mask=True))


@functools.partial(inference.defjvp, symbolic_zeros=True)
def _inference_jvp(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    """Like the rule of the training form, see `jax_bnar._autodiff.training`."""
    y, mask = inference(*primals, config, save_mask)
    x, z, affine, statistics = primals
    saved = {"y": y, "z": z}.get(config.inference_gate)
    statistics = given_or_neutral(x, statistics, config.layout)
    residuals = Residuals(x, saved, statistics, affine)
    (y_dot,) = linear_call(_InferenceTangent(config), residuals, moving(tangents), (y,))
    return (y, mask), (y_dot, zero_from_primal(mask, symbolic_zeros=True))


@dataclasses.dataclass(frozen=True)
class _InferenceTangent(LocalMap):
    """The linear map from the tangents of (x, z, affine, statistics) to the tangent of y."""

    config: Config

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return (any(jax.tree.leaves((residuals, tangents))),)

    def tangent(self, residuals: Residuals, tangents: Any) -> tuple[jax.Array]:
        y_dot = normalise_tangent(
            residuals,
            tangents,
            layout=self.config.layout,
            epsilon=self.config.epsilon,
            gate=self.config.inference_gate,
            out_dtype=self.config.out_dtype,
            **self.config.activation_statics,
        )
        return (y_dot,)

    def transpose(self, residuals: Residuals, cotangents: tuple[jax.Array]) -> tuple[Any, ...]:
        """Cotangents of (x, z, affine, statistics), where mean and var do not depend on x:

        dx = scale*rstd*e    dmean = -scale*rstd*sum(e)
        dvar = -scale*rstd^3/2 * sum(e*(x-mean))
        """
        x, saved, statistics, affine = residuals
        (dy,) = cotangents
        config, operations = self.config, primitive.OPERATIONS[self.config.inputs]
        gate = config.inference_gate
        sum_e, centred, dz = operations.backward_reduce(
            *(dy, x, saved, *read_by_gate(gate, statistics, affine)),
            **config.backward_statics(gate),
        )
        rstd = [reference.reciprocal_std(own.var, config.epsilon) for own in statistics]
        a = [reference.scaled_rstd(r, own.scale) for r, own in zip(rstd, affine, strict=True)]
        zeros = [jnp.zeros_like(own) for own in a]
        of_apply = tuple(own if recomputes(gate) else own._replace(bias=None) for own in affine)
        dx = operations.backward_apply(
            *(dy, x, saved, statistics, of_apply),
            tuple(Coefficients(zero, zero) for zero in zeros),
            **config.apply_statics(gate),
        )
        return (
            dx,
            dz,
            tuple(
                Affine(None if own.scale is None else r * c, None if own.bias is None else sum_e)
                for own, r, c in zip(affine, rstd, centred, strict=True)
            ),
            tuple(
                Statistics(-own * sum_e, -own * (r * (r * (c / 2))))  # rstd^3 may underflow.
                for own, r, c in zip(a, rstd, centred, strict=True)
            ),
        )
