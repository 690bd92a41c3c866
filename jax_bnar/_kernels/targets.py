"""Registers the FFI targets of the native modules once, at import."""

from typing import Any, Final

import jax
import numpy as np

from jax_bnar._base import installation
from jax_bnar._base.native_module import CUDA_DISTRIBUTION, cuda_load_error, load_error
from jax_bnar._base.native_module import cuda as _cuda
from jax_bnar._base.native_module import native as _native

VERSION: Final = "v1"

# Maps XLA's platform names (used by register_ffi_target) to MLIR's (used by register_lowering).
_MLIR_PLATFORM: Final = {"cpu": "cpu", "CUDA": "cuda"}
_XLA_PLATFORM: Final = {mlir: xla for xla, mlir in _MLIR_PLATFORM.items()}


def target_name(operation: str) -> str:
    """The custom call's name; its version changes with the operands or attributes (jax.export)."""
    return f"jax_bnar_{operation}_{VERSION}"


# Maps XLA's platform names to the native modules that have the kernels.
_modules: Final[dict[str, Any]] = {}


def _register() -> frozenset[tuple[str, str]]:
    registered = set()
    for module in (_native, _cuda):
        for platform, handlers in (module.registrations() if module else {}).items():
            _modules[platform] = module
            for operation, handler in handlers.items():
                jax.ffi.register_ffi_target(target_name(operation), handler, platform=platform)
                registered.add((operation, _MLIR_PLATFORM[platform]))
    return frozenset(registered)


# The (operation, MLIR platform) pairs that have a kernel in this installation.
registered: Final = _register()


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels use here, or None without a native module.

    Raises:
        ValueError: the environment variable JAX_BNAR_CPU_ISA names an instruction set that is
            unknown, or that this processor does not support.
    """
    return _native.cpu_isa() if _native else None


def workspace_bytes(platform: str, groups: Any, rows: Any, channels: Any, inner: Any) -> Any:
    """Bytes of workspace, a hidden result, that a summing kernel needs for this canonical shape.

    It may be 0. If a size is symbolic (jax.export), the result is an upper bound.
    """
    xla_platform = _XLA_PLATFORM[platform]
    module = _modules[xla_platform]
    sizes = (groups, rows, channels, inner)
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        return module.workspace_bytes(xla_platform, *map(int, sizes))
    bound, per_group, per_channel = module.workspace_bound(xla_platform)
    if bound == 0:
        return 0  # Zero times a symbol would be a symbolic size rather than 0.
    return bound + groups * (per_group + channels * per_channel)


def cuda_launches() -> dict[str, int]:
    """The number of launches of each CUDA kernel by each strategy since the process started."""
    # In tests, the emulated CUDA kernels replace the CPU kernels.
    for module in (_cuda, _native):
        if hasattr(module, "cuda_launches"):
            return module.cuda_launches()
    return {}


def why_no_cuda() -> str:
    """Why there are no CUDA kernels here, or an empty string if there are."""
    if _cuda is not None:
        return ""
    if cuda_load_error is not None:
        return installation.why_no_cuda_module(cuda_load_error)[0]
    why_not_built = _native.why_no_cuda() if _native else ""
    missing = f"{CUDA_DISTRIBUTION} is not installed"
    return f"{why_not_built}, and {missing}" if why_not_built else missing


def why_no_kernel(operation: str) -> str:
    """Why there is no kernel: a clause for the error message of implementation='ffi'."""
    if load_error is not None:
        return "; ".join(installation.why_no_native_module(load_error))
    platforms = sorted(platform for name, platform in registered if name == operation)
    because = "" if "cuda" in platforms else f" (none for cuda: {why_no_cuda()})"
    return (
        f"this installation has kernels for {', '.join(platforms) or 'no platform'} only{because}"
    )
