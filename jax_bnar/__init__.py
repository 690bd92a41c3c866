"""Fused BatchNorm-Add-ReLU for JAX: `y = relu(batch_norm(x) + z)`, forward and backward."""

__version__ = "0.1.0"  # Comes first, because the native modules' version is compared with it.

from jax_bnar._base import startup as _startup

_startup.require_jax()  # Must precede the imports below, which fail on an older JAX.

from jax_bnar import ops as ops
from jax_bnar._benchmark import BenchmarkReport as BenchmarkReport
from jax_bnar._benchmark import Measurement as Measurement
from jax_bnar._benchmark import benchmark as benchmark
from jax_bnar._fuse import FusionReport as FusionReport
from jax_bnar._fuse import explain as explain
from jax_bnar._fuse import fuse as fuse
from jax_bnar._kernels.export import DISABLED_EXPORT_CHECKS as DISABLED_EXPORT_CHECKS
from jax_bnar._operators.api import BatchNormResult as BatchNormResult
from jax_bnar._operators.api import batch_norm as batch_norm
from jax_bnar._operators.api import batch_norm_inference as batch_norm_inference
from jax_bnar._operators.api import bn_add_relu as bn_add_relu
from jax_bnar._operators.api import bn_add_relu_inference as bn_add_relu_inference
from jax_bnar._operators.api import bn_relu as bn_relu
from jax_bnar._operators.api import bn_relu_inference as bn_relu_inference
from jax_bnar._operators.dual import DualBatchNormResult as DualBatchNormResult
from jax_bnar._operators.dual import dual_bn_add_relu as dual_bn_add_relu
from jax_bnar._operators.dual import dual_bn_add_relu_inference as dual_bn_add_relu_inference

# Imported when they are first asked for, because they need Flax.
_LAZY_MODULES = ("flax_layers", "nnx_layers", "torch_weights")


def __getattr__(name: str) -> object:
    if name in _LAZY_MODULES:
        import importlib

        return importlib.import_module(f"jax_bnar.{name}")
    raise AttributeError(f"module 'jax_bnar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES})
