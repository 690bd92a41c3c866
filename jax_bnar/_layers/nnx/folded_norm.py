"""The module that replaces BatchNorm in a folded NNX ResNet."""

from typing import Any

import jax
from flax import nnx

from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import ActivationLike
from jax_bnar._layers.fold import folded_call


class FoldedBatchNorm(nnx.Module):
    """What remains of a BatchNorm after `fold_batch_norms`: act(x + bias + residual) in one pass.

    Args:
        bias: shape (C,).
        dtype: dtype of the result; None keeps that of x.
        activation: as in `BatchNorm`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu_inference`.
    """

    # It applies its activation itself; other norms may mean anything by that attribute.
    is_folded = True

    def __init__(
        self,
        bias: jax.Array,
        *,
        dtype: Any,
        activation: ActivationLike,
        implementation: Implementation,
    ) -> None:
        self.bias = nnx.Param(bias)
        self.dtype = dtype
        self.activation: ActivationLike = activation
        self.implementation: Implementation = implementation
        # train() sets this to False, and then __call__ raises an error.
        self.use_running_average = True

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Maps x of shape (..., C) to y of that shape; `residual` has the shape and dtype of x."""
        if not self.use_running_average:
            raise ValueError(
                "FoldedBatchNorm: a folded network is for inference only; call model.eval()."
            )
        return folded_call(self, x, self.bias[...], residual)
