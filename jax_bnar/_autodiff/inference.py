"""The inference form (given mean and var) in the user's layout, with its derivatives.

Operands are (x, z, affine, statistics), and what belongs to the inputs is in tuples; see
`jax_bnar._base.inputs`.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from jax_bnar import primitive, reference
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.tangents import Residuals, normalise_tangent
from jax_bnar._autodiff.training import without_symbolic_zeros
from jax_bnar._base.config import Config
from jax_bnar._base.gates import recomputes
from jax_bnar._base.inputs import Affine, Statistics
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
        return *operations.inference(*operands, **config.inference_statics), None
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
    x_dot, z_dot, *of_vectors = without_symbolic_zeros(tangents)
    has_sums = bool(jax.tree.leaves(of_vectors))
    if saved is y and not has_sums and config.out_dtype is None:
        # Only x's shape is needed, and y has the same, so that x need not be kept for backward.
        x = (y,) * config.inputs
    residuals = Residuals(x, saved, statistics, affine)
    linear_map = _InferenceTangent(config, has_sums)
    (y_dot,) = linear_call(linear_map, residuals, (x_dot, z_dot, *of_vectors), (y,))
    return (y, mask), (y_dot, zero_from_primal(mask, symbolic_zeros=True))


@dataclasses.dataclass(frozen=True)
class _InferenceTangent(LocalMap):
    """The linear map from the tangents of (x, z, affine, statistics) to the tangent of y.

    Attributes:
        config: that of the call.
        has_sums: whether there may be tangents of parameters or statistics. Their cotangents are
            sums, which are not computed for frozen ones.
    """

    config: Config
    has_sums: bool

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
        config, gate = self.config, self.config.inference_gate
        dx, dz, sum_e, centred = primitive.OPERATIONS[config.inputs].inference_backward(
            *(dy, x, saved, statistics),
            affine
            if recomputes(gate)
            else tuple(affine_i._replace(bias=None) for affine_i in affine),
            has_sums=self.has_sums,
            **config.backward_statics(gate),
        )
        if config.dz_is_dy:
            dz = dy
        if not self.has_sums:
            nothing = tuple(Affine(None, None) for _ in x), tuple(Statistics(None, None) for _ in x)
            return dx, dz, *nothing
        rstd, a = reference.roots_and_factors(statistics, affine, config.epsilon)
        return (
            dx,
            dz,
            tuple(
                Affine(None if p.scale is None else r * c, None if p.bias is None else sum_e)
                for p, r, c in zip(affine, rstd, centred, strict=True)
            ),
            tuple(
                Statistics(-a_i * sum_e, -a_i * (r * (r * (c / 2))))  # rstd^3 may underflow.
                for a_i, r, c in zip(a, rstd, centred, strict=True)
            ),
        )
