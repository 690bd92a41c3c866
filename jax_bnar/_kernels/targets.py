"""Registers the FFI targets of the native module, once, at import."""

from typing import Any, Final

import jax
import numpy as np

from jax_bnar._base.native_module import load_error
from jax_bnar._base.native_module import native as _native

VERSION: Final = "v1"

# XLA's platform name (as in register_ffi_target) -> MLIR's (as in register_lowering).
_MLIR_PLATFORM: Final = {"cpu": "cpu", "CUDA": "cuda"}
_XLA_PLATFORM: Final = {mlir: xla for xla, mlir in _MLIR_PLATFORM.items()}


def target_name(operation: str) -> str:
    """The custom call's name; the version changes with operands or attributes (jax.export)."""
    return f"jax_bnar_{operation}_{VERSION}"


def _register() -> frozenset[tuple[str, str]]:
    registered = set()
    for platform, handlers in (_native.registrations() if _native else {}).items():
        for operation, handler in handlers.items():
            jax.ffi.register_ffi_target(target_name(operation), handler, platform=platform)
            registered.add((operation, _MLIR_PLATFORM[platform]))
    return frozenset(registered)


# (operation, MLIR platform) pairs that have a kernel in this build.
registered: Final = _register()


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels run with here, None without a native module.

    Raises ValueError where the environment variable JAX_BNAR_CPU_ISA asks for one that is not
    known, or that this processor does not run.
    """
    return _native.cpu_isa() if _native else None


def workspace_bytes(platform: str, groups: Any, rows: Any, channels: Any, inner: Any) -> Any:
    """Bytes of the hidden result that a kernel which adds over channels works in; 0 for none.

    Of the canonical shape; a size may be symbolic (jax.export), and the answer is then a bound.
    """
    assert _native is not None
    xla_platform = _XLA_PLATFORM[platform]
    sizes = (groups, rows, channels, inner)
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        return _native.workspace_bytes(xla_platform, *map(int, sizes))
    bound, per_group, per_channel = _native.workspace_bound(xla_platform)
    if bound == 0:
        return 0  # and not zero times a symbol, which would be a symbol too
    return bound + groups * (per_group + channels * per_channel)


def why_no_kernel(operation: str) -> str:
    """One sentence for the error of implementation='ffi' on a platform without a kernel."""
    if load_error is not None:
        return (
            f"the native module of jax_bnar did not load ({load_error}); install the package with"
            " `pip install .`"
        )
    assert _native is not None
    platforms = sorted(platform for name, platform in registered if name == operation)
    why_no_cuda = _native.why_no_cuda()
    because = f" (none for cuda: {why_no_cuda})" if why_no_cuda else ""
    return f"this build has kernels for {', '.join(platforms) or 'no platform'} only{because}"
