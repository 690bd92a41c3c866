"""The inference form (given mean and var) in the user's layout, with its derivatives."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jax_bnar import primitive, reference
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.tangents import normalise_tangent
from jax_bnar._base.config import Config, Gate
from jax_bnar.plain_inference import neutral_statistics

# x, saved (as selected by `save=`), scale, bias, mean, var
_Residuals = tuple[
    jax.Array, jax.Array | None, jax.Array | None, jax.Array | None, jax.Array, jax.Array
]
_Results = tuple[jax.Array, jax.Array | None]  # y, mask


@functools.partial(jax.custom_jvp, nondiff_argnums=(6, 7))
def inference(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array | None,
    var: jax.Array | None,
    config: Config,
    save_mask: bool = False,
) -> _Results:
    """Returns (y, mask); scale, bias, mean and var have shape (1, C).

    mask is None unless `save_mask` is set. If mean and var are None, y = act(x + bias + z); scale
    is None too then, and epsilon is `NEUTRAL_EPSILON`. All operands must vary over the same mesh
    axes (`jax_bnar._sharding.alignment`).
    """
    operands = (x, z, scale, bias, mean, var)
    if not save_mask:
        return primitive.inference(*operands, **config.inference_statics), None
    y, mask = primitive.normalise(*operands, **config.forward_statics(save_mask=True))
    return y, mask


@functools.partial(inference.defjvp, symbolic_zeros=True)
def _inference_jvp(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    """Like the rule of the training form, see `jax_bnar._autodiff.training`."""
    y, mask = inference(*primals, config, save_mask)
    x, _, scale, bias, mean, var = primals
    saved = None if config.activation == "none" else y
    if mean is None or var is None:
        mean, var = neutral_statistics(x, config.layout)
    moving = tuple(None if isinstance(t, SymbolicZero) else t for t in tangents)
    residuals = (x, saved, scale, bias, mean, var)
    (y_dot,) = linear_call(_InferenceTangent(config), residuals, moving, (y,))
    return (y, mask), (y_dot, zero_from_primal(mask, symbolic_zeros=True))


@dataclasses.dataclass(frozen=True)
class _InferenceTangent(LocalMap):
    """The linear map from the tangents of (x, z, scale, bias, mean, var) to the tangent of y."""

    config: Config

    @property
    def gate(self) -> Gate:
        # Gate "x" would be wrong if only one of the two passes is a kernel: their `a` may differ in
        # the last bit, and so might the sign.
        return "none" if self.config.activation == "none" else "y"

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return (any(jax.tree.leaves((residuals, tangents))),)

    def tangent(
        self, residuals: _Residuals, tangents: tuple[jax.Array | None, ...]
    ) -> tuple[jax.Array]:
        y_dot = normalise_tangent(
            *residuals,
            tangents,  # type: ignore[arg-type]
            layout=self.config.layout,
            epsilon=self.config.epsilon,
            gate=self.gate,
        )
        return (y_dot,)

    def transpose(
        self, residuals: _Residuals, cotangents: tuple[jax.Array]
    ) -> tuple[jax.Array | None, ...]:
        """Cotangents of (x, z, scale, bias, mean, var), where mean and var do not depend on x:

        dx = scale*rstd*e    dmean = -scale*rstd*sum(e)
        dvar = -scale*rstd^3/2 * sum(e*(x-mean))
        """
        x, saved, scale, bias, mean, var = residuals
        (dy,) = cotangents
        config = self.config
        rstd = reference.reciprocal_std(var, config.epsilon)
        a = reference.scaled_rstd(rstd, scale)
        statics: dict[str, Any] = {
            **config.common_statics,
            "epsilon": config.epsilon,
            "gate": self.gate,
        }
        arrays = (dy, x, saved, mean)
        sum_e, sum_e_centred, *dz = primitive.backward_reduce(
            *arrays, None, None, None, **statics, has_z=config.has_z
        )
        zero = jnp.zeros_like(a)
        (dx,) = primitive.backward_apply(*arrays, var, scale, None, zero, zero, **statics)
        return (
            dx,
            dz[0] if dz else None,
            None if scale is None else rstd * sum_e_centred,
            None if bias is None else sum_e,
            -a * sum_e,
            -a * (rstd * (rstd * (sum_e_centred / 2))),  # rstd^3 itself may underflow.
        )
