"""Registers the FFI targets of the native module once, at import."""

from typing import Any, Final

import jax
import numpy as np

from jax_bnar._base.native_module import load_error
from jax_bnar._base.native_module import native as _native

VERSION: Final = "v1"

# Maps XLA's platform names (used by register_ffi_target) to MLIR's (used by register_lowering).
_MLIR_PLATFORM: Final = {"cpu": "cpu", "CUDA": "cuda"}
_XLA_PLATFORM: Final = {mlir: xla for xla, mlir in _MLIR_PLATFORM.items()}


def target_name(operation: str) -> str:
    """The custom call's name; its version changes with the operands or attributes (jax.export)."""
    return f"jax_bnar_{operation}_{VERSION}"


def _register() -> frozenset[tuple[str, str]]:
    registered = set()
    for platform, handlers in (_native.registrations() if _native else {}).items():
        for operation, handler in handlers.items():
            jax.ffi.register_ffi_target(target_name(operation), handler, platform=platform)
            registered.add((operation, _MLIR_PLATFORM[platform]))
    return frozenset(registered)


# The (operation, MLIR platform) pairs that have a kernel in this build.
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
    assert _native is not None
    xla_platform = _XLA_PLATFORM[platform]
    sizes = (groups, rows, channels, inner)
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        return _native.workspace_bytes(xla_platform, *map(int, sizes))
    bound, per_group, per_channel = _native.workspace_bound(xla_platform)
    if bound == 0:
        return 0  # Zero times a symbol would be a symbolic size rather than 0.
    return bound + groups * (per_group + channels * per_channel)


def why_no_kernel(operation: str) -> str:
    """Why there is no kernel: a clause for the error message of implementation='ffi'."""
    if load_error is not None:
        return (
            f"the native module of jax_bnar did not load ({load_error}); install the package by"
            " running `pip install .`"
        )
    assert _native is not None
    platforms = sorted(platform for name, platform in registered if name == operation)
    why_no_cuda = _native.why_no_cuda()
    because = f" (none for cuda: {why_no_cuda})" if why_no_cuda else ""
    return f"this build has kernels for {', '.join(platforms) or 'no platform'} only{because}"
