"""Folded inference of the NNX ResNet; import it from `jax_bnar.nnx_layers`."""

from typing import Any

from flax import nnx

from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import (
    NONE,
    LayerActivation,
    layer_activation,
)
from jax_bnar._layers.fold import Folded, fold
from jax_bnar._layers.nnx.batch_norm import BatchNorm, stored_activation
from jax_bnar._layers.nnx.folded_norm import FoldedBatchNorm
from jax_bnar._layers.nnx.resnet import Downsample, FusedBottleneck, ResNet, Stem


def fold_batch_norms(model: ResNet, *, implementation: Implementation = None) -> ResNet:
    """A copy of a ResNet, for inference, whose BatchNorms are folded into the convolutions.

    Each kernel is multiplied by scale/sqrt(var + epsilon) of its channels. The rest is a bias,
    which one pass (our kernel on CPUs, a loop of XLA's elsewhere) adds together with the residual
    and the ReLU. A shortcut with a BatchNorm needs no pass, because its bias is added to that of
    the last convolution. The result equals that of the unfolded network up to rounding in `dtype`,
    because kernels are rounded after they are scaled. `jax_bnar.fold_batch_norms` folds any other
    network.

    Args:
        model: `ResNet` or `ResNet50` with our BatchNorm or `flax.nnx.BatchNorm`; not modified.
        implementation: implementation of the pass, as in `jax_bnar.bn_add_relu_inference`.

    Returns:
        The folded copy.

    Raises:
        TypeError: model is not a `ResNet`, or one of its norms is not a BatchNorm.
        ValueError: a norm has an activation other than that of its block.
    """
    if not isinstance(model, ResNet):
        raise TypeError(
            "fold_batch_norms: model must be a jax_bnar.nnx_layers.ResNet, got"
            f" {type(model).__name__}."
        )
    if any(isinstance(module, FoldedBatchNorm) for _, module in nnx.iter_modules(model)):
        raise TypeError("fold_batch_norms: the BatchNorms of the model are already folded.")
    model = nnx.clone(model)

    def replaced(conv: Any, norm: Any, act: Any, more_bias: Any = None) -> FoldedBatchNorm:
        activation = layer_activation("FusedBottleneck", "act", act)
        folded = _folded(conv, norm, activation, more_bias)
        conv.kernel[...] = folded.kernel
        return FoldedBatchNorm(
            folded.bias,
            dtype=norm.dtype,
            activation=stored_activation(act) if activation.is_fused else "none",
            implementation=implementation,
        )

    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, Stem):
            module.bn = replaced(module.conv, module.bn, nnx.relu)
        elif isinstance(module, FusedBottleneck):
            more_bias = None
            if isinstance(module.downsample, Downsample):
                shortcut = module.downsample
                folded = _folded(shortcut.conv, shortcut.bn, NONE)
                shortcut.conv.kernel[...] = folded.kernel
                shortcut.bn = nnx.data(None)
                more_bias = folded.bias
            module.bn0 = replaced(module.conv0, module.bn0, module.act)
            module.bn1 = replaced(module.conv1, module.bn1, module.act)
            module.bn2 = replaced(module.conv2, module.bn2, module.act, more_bias)
    return model


def _folded(conv: Any, norm: Any, activation: LayerActivation, more_bias: Any = None) -> Folded:
    if not isinstance(norm, nnx.BatchNorm):
        raise TypeError(
            "fold_batch_norms: the norms of the model must be BatchNorms, got"
            f" {type(norm).__name__}."
        )
    given = norm.activation if isinstance(norm, BatchNorm) else None
    taken_in = layer_activation("BatchNorm", "activation", given)
    if taken_in != NONE and not (taken_in.is_fused and taken_in == activation):
        raise ValueError(
            "fold_batch_norms: a norm may include the activation of its block but no other one,"
            f" got a norm with activation={given!r}."
        )
    return fold(
        conv.kernel[...],
        None if norm.scale is None else norm.scale[...],
        None if norm.bias is None else norm.bias[...],
        norm.mean[...],
        norm.var[...],
        norm.epsilon,
        more_bias,
    )
