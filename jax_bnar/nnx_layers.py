"""Flax NNX layers on the fused operators: `BatchNorm`, `BatchRenorm`, `ResNet` and others.

`convert_batch_norms` replaces the BatchNorms of an existing model by ours, in place;
`fold_batch_norms` converts a trained `ResNet` for inference.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jax_bnar.nnx_layers needs Flax, which is not installed: pip install flax"
    ) from error

from jax_bnar._base.public_names import show_public_names as _show_public_names
from jax_bnar._layers.nnx.batch_norm import BatchNorm, Shortcut
from jax_bnar._layers.nnx.batch_renorm import BatchRenorm
from jax_bnar._layers.nnx.convert import convert_batch_norms
from jax_bnar._layers.nnx.fold import fold_batch_norms
from jax_bnar._layers.nnx.resnet import FusedBottleneck, ResNet, ResNet50

__all__ = [
    "BatchNorm",
    "BatchRenorm",
    "FusedBottleneck",
    "ResNet",
    "ResNet50",
    "Shortcut",
    "convert_batch_norms",
    "fold_batch_norms",
]

_show_public_names(globals())
