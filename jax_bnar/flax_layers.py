"""Flax Linen layers on the fused operators: `BatchNorm`, `BatchRenorm`, `ResNet` and others.

Their variables have the names, shapes and dtypes of `flax.linen.BatchNorm` and of Flax's ImageNet
example, so checkpoints are interchangeable. (Linen names variables after the class, hence the name
`BatchNorm`.) `fold_batch_norms` converts a trained `ResNet` for inference.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jax_bnar.flax_layers needs Flax, which is not installed: pip install flax"
    ) from error

from jax_bnar._base.public_names import show_public_names as _show_public_names
from jax_bnar._layers.linen.batch_norm import BatchNorm
from jax_bnar._layers.linen.batch_renorm import BatchRenorm
from jax_bnar._layers.linen.fold import fold_batch_norms
from jax_bnar._layers.linen.resnet import FusedBottleneck, ResNet, ResNet50

__all__ = [
    "BatchNorm",
    "BatchRenorm",
    "FusedBottleneck",
    "ResNet",
    "ResNet50",
    "fold_batch_norms",
]

_show_public_names(globals())
