"""The module that replaces BatchNorm in a folded Linen ResNet."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import ActivationLike
from jax_bnar._layers.fold import folded_call


class FoldedBatchNorm(nn.Module):
    """What remains of a BatchNorm after `fold_batch_norms`: act(x + bias + residual) in one pass.

    The only variable is `params/bias`. Fields that a ResNet passes to its norm but that no longer
    have a meaning (momentum, epsilon, scale_init) are accepted and have no effect.

    Attributes:
        use_running_average: must not be False, because a folded norm cannot use batch statistics.
        momentum: no effect.
        epsilon: no effect.
        dtype: dtype of the result; None keeps that of x.
        scale_init: no effect.
        activation: as in `BatchNorm`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu_inference`.
    """

    use_running_average: bool | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Any = None
    scale_init: Any = None
    activation: ActivationLike = "none"
    implementation: Implementation = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Maps x of shape (..., C) to y of that shape; `residual` has the shape and dtype of x."""
        if False in (self.use_running_average, use_running_average):
            raise ValueError(
                "FoldedBatchNorm: a folded network is for inference only; call it with train=False"
                " (use_running_average=True)."
            )
        bias = self.param("bias", nn.initializers.zeros_init(), (x.shape[-1],), jnp.float32)
        return folded_call(self, x, bias, residual)
