"""Registers the FFI targets of the native module, once, at import."""

from typing import Final

import jax

VERSION: Final = "v1"

# XLA's platform name (as in register_ffi_target) -> MLIR's (as in register_lowering).
_MLIR_PLATFORM: Final = {"cpu": "cpu", "CUDA": "cuda"}

load_error: ImportError | None = None
try:
    from jax_bnar import _native
except ImportError as error:  # a source tree that was never built
    _native = None
    load_error = error


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
    """The instruction set that the CPU kernels run with here, None without a native module."""
    return _native.cpu_isa() if _native else None


def why_no_kernel(operation: str) -> str:
    """One sentence for the error of implementation='ffi' on a platform without a kernel."""
    if load_error is not None:
        return (
            f"the native module of jax_bnar did not load ({load_error}); install the package with"
            " `pip install .`"
        )
    platforms = sorted(platform for name, platform in registered if name == operation)
    return f"this build has kernels for {', '.join(platforms) or 'no platform'} only"
