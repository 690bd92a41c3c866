"""What the BatchNorms of a folded Linen ResNet become."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_bnar._layers.activation import ActivationLike, layer_activation
from jax_bnar._layers.fold import bias_act


class FoldedBatchNorm(nn.Module):
    """What is left of a BatchNorm after `fold_batch_norms`: act(x + bias + residual), one pass.

    The only variable is `params/bias`. Fields that a ResNet passes to its norm and that have no
    meaning any more (momentum, epsilon, scale_init) are accepted and have no effect.

    Attributes:
        use_running_average: must not be False, for there are no statistics of a batch any more.
        momentum: no effect.
        epsilon: no effect.
        dtype: of the result; None keeps that of x.
        scale_init: no effect.
        activation: as in `BatchNorm`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu`.
    """

    use_running_average: bool | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Any = None
    scale_init: Any = None
    activation: ActivationLike = "none"
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Shape (..., C) in, the same out; `residual` has the shape and dtype of x."""
        if False in (self.use_running_average, use_running_average):
            raise ValueError(
                "FoldedBatchNorm: a folded network is for inference only; call it with train=False"
                " (use_running_average=True)."
            )
        activation = layer_activation("FoldedBatchNorm", "activation", self.activation)
        bias = self.param("bias", nn.initializers.zeros_init(), (x.shape[-1],), jnp.float32)
        y = bias_act(
            x, residual, bias, activation=activation.fused, implementation=self.implementation
        )
        return activation.finish(y if self.dtype is None else y.astype(self.dtype))
