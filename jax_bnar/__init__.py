"""Fused BatchNorm-Add-ReLU for JAX: `y = relu(batch_norm(x) + z)`, forward and backward."""

# The only place of the version. It comes first, because the native modules compare theirs with it.
__version__ = "0.1.0"

import typing as _typing

from jax_bnar._base import startup as _startup

_startup.require_jax()  # Must precede the imports below, which fail on another JAX.

from jax_bnar import checkpoint_policies, ops
from jax_bnar._base.public_names import show_public_names as _show_public_names
from jax_bnar._benchmark import BenchmarkReport, Difference, Measurement, benchmark
from jax_bnar._fold import FoldedLayer, FoldedNetwork, FoldingReport, fold_batch_norms
from jax_bnar._fuse import FusionReport, explain, fuse
from jax_bnar._kernels.export import DISABLED_EXPORT_CHECKS
from jax_bnar._operators.activated import (
    bn_act,
    bn_act_inference,
    dual_bn_act,
    dual_bn_act_inference,
)
from jax_bnar._operators.api import (
    BatchNormResult,
    batch_norm,
    batch_norm_inference,
    bn_add_relu,
    bn_add_relu_inference,
    bn_relu,
    bn_relu_inference,
)
from jax_bnar._operators.dual import (
    DualBatchNormResult,
    dual_bn_add_relu,
    dual_bn_add_relu_inference,
)
from jax_bnar._operators.statistics import BatchStatisticsResult, batch_statistics

__all__ = [
    "DISABLED_EXPORT_CHECKS",
    "BatchNormResult",
    "BatchStatisticsResult",
    "BenchmarkReport",
    "Difference",
    "DualBatchNormResult",
    "FoldedLayer",
    "FoldedNetwork",
    "FoldingReport",
    "FusionReport",
    "Measurement",
    "batch_norm",
    "batch_norm_inference",
    "batch_statistics",
    "benchmark",
    "bn_act",
    "bn_act_inference",
    "bn_add_relu",
    "bn_add_relu_inference",
    "bn_relu",
    "bn_relu_inference",
    "checkpoint_policies",
    "dual_bn_act",
    "dual_bn_act_inference",
    "dual_bn_add_relu",
    "dual_bn_add_relu_inference",
    "explain",
    "fold_batch_norms",
    "fuse",
    "ops",
]

_show_public_names(globals())

# Imported when they are first asked for, because each needs a library of layers.
_LAZY_MODULES = ("equinox_layers", "flax_layers", "haiku_layers", "nnx_layers", "torch_weights")
# Where a user may look for what these modules have.
_LAYERS = ("BatchNorm", "BatchRenorm", "FusedBottleneck", "ResNet", "ResNet50")

if _typing.TYPE_CHECKING:
    from jax_bnar import equinox_layers as equinox_layers
    from jax_bnar import flax_layers as flax_layers
    from jax_bnar import haiku_layers as haiku_layers
    from jax_bnar import nnx_layers as nnx_layers
    from jax_bnar import torch_weights as torch_weights
else:  # A type checker would take this for a package in which every name exists.

    def __getattr__(name: str) -> object:
        if name in _LAZY_MODULES:
            import importlib

            return importlib.import_module(f"jax_bnar.{name}")
        message = f"module 'jax_bnar' has no attribute {name!r}"
        if name in _LAYERS:
            message += f"; use jax_bnar.flax_layers.{name} (Linen) or jax_bnar.nnx_layers.{name}"
        raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES})
