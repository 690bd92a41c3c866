"""One call of a BatchNorm layer, between the library's variables and the operators."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.arrays import OptionalArray
from jax_bnar._layers import rules
from jax_bnar._layers.activation import LayerActivation
from jax_bnar._operators.validation import check_shape_like


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The options of a layer that its arithmetic depends on; fields as those of the layers."""

    axis: Any
    epsilon: float
    activation: LayerActivation
    num_groups: int
    save: str
    implementation: str | None
    axis_name: Any
    axis_index_groups: Any

    def with_batch_statistics(
        self,
        x: jax.Array,
        residual: OptionalArray,
        scale: OptionalArray,
        bias: OptionalArray,
        *,
        mask: OptionalArray,
        result: Any,
    ) -> tuple[jax.Array, rules.BatchStatistics]:
        """(y, statistics of x); y has the dtype `result` unless a callable changes it."""
        view = rules.channel_view(self.axis, x.shape)
        y, statistics = rules.normalise_with_batch_statistics(
            *_operands(view, x, residual, scale, bias, result),
            axis=view.axis,
            epsilon=self.epsilon,
            activation=self.activation.fused,
            num_groups=self.num_groups,
            save=self.save,
            implementation=self.implementation,
            mask=None if mask is None else view.view(mask),
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
        )
        return self.activation.finish(view.restore(y).astype(result)), statistics

    def with_given_statistics(
        self,
        x: jax.Array,
        residual: OptionalArray,
        scale: OptionalArray,
        bias: OptionalArray,
        mean: jax.Array,
        var: jax.Array,
        *,
        result: Any,
    ) -> jax.Array:
        """y; its dtype is `result` unless a callable changes it."""
        view = rules.channel_view(self.axis, x.shape)
        y = rules.normalise_with_given_statistics(
            *_operands(view, x, residual, scale, bias, result),
            mean.reshape(-1),
            var.reshape(-1),
            axis=view.axis,
            epsilon=self.epsilon,
            activation=self.activation.fused,
            implementation=self.implementation,
        )
        return self.activation.finish(view.restore(y).astype(result))


def checked_residual(residual: Any, x: jax.Array) -> OptionalArray:
    if residual is None:
        return None
    residual = jnp.asarray(residual)
    check_shape_like("BatchNorm", "residual", residual, x)
    return residual


def checked_mask(mask: Any, x: jax.Array) -> OptionalArray:
    return None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)


def require_real(x: jax.Array, result: Any, instead: str) -> None:
    for name, dtype in (("x", x.dtype), ("the result", result)):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise NotImplementedError(
                f"BatchNorm: {name} has the complex dtype {np.dtype(dtype)}, which the fused"
                f" operators do not know; use {instead}."
            )


def _operands(
    view: rules.ChannelView,
    x: jax.Array,
    residual: OptionalArray,
    scale: OptionalArray,
    bias: OptionalArray,
    result: Any,
) -> tuple[jax.Array, OptionalArray, OptionalArray, OptionalArray]:
    """In the view with one channel axis, and in the dtype that the operator runs in."""
    arrays = [x] if residual is None else [x, residual]
    compute = rules.compute_dtype(result, *(a.dtype for a in arrays))
    x_view, *residual_view = (view.view(a.astype(compute)) for a in arrays)
    scale, bias = (None if v is None else v.reshape(-1) for v in (scale, bias))
    return x_view, residual_view[0] if residual_view else None, scale, bias
