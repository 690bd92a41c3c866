"""The kernels of this installation, and the registration of their FFI targets, once, at import.

The CUDA targets are registered wherever the native module loads. Without kernels that can be
loaded, programs can be compiled for the GPUs of other machines (`ahead_of_time`), and running one
here is an error.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import jax
import numpy as np

from jax_bnar._base import installation
from jax_bnar._base.canonical import CanonicalShape
from jax_bnar._base.native_module import (
    CUDA_DISTRIBUTION,
    cuda,
    cuda_load_error,
    load_error,
    native,
)
from jax_bnar._kernels import cuda_driver, cuda_images
from jax_bnar._kernels.cuda_images import CudaBuild, Obstacle

VERSION: Final = "v1"

# Maps XLA's platform names (used by register_ffi_target) to MLIR's (used by register_lowering).
_MLIR_PLATFORM: Final = {"cpu": "cpu", "CUDA": "cuda"}
XLA_PLATFORM: Final = {mlir: xla for xla, mlir in _MLIR_PLATFORM.items()}

# The native modules that have kernels, by XLA's name of their platform.
modules: Final[dict[str, Any]] = {
    platform: module
    for module in (native, cuda)
    for platform in (module.registrations() if module else ())
}
# The (operation, MLIR platform) pairs that have a kernel in this installation.
kernels: Final = frozenset(
    (operation, _MLIR_PLATFORM[platform])
    for platform, module in modules.items()
    for operation in module.registrations()[platform]
)
# The (operation, MLIR platform) pairs that a program may call: those, and the CUDA kernels of an
# installation on another machine, for which the CPU module knows workspaces and masks as well.
callable_kernels: Final = kernels | frozenset(
    (operation, "cuda") for operation in (native.registrations()["cpu"] if native else ())
)
# The modules that know what a call takes, by XLA's name of its platform.
_planners: Final[dict[str, Any]] = ({"CUDA": native} if native else {}) | modules
# What the CUDA kernels were compiled with and for; None if there are none.
cuda_build: Final = CudaBuild.of(cuda) if cuda is not None else None


def mlir_platform(backend: str) -> str:
    """MLIR's name of the platform of a JAX backend, as in `jax.default_backend()`."""
    return "cuda" if backend == "gpu" else backend


def target_name(operation: str) -> str:
    """The custom call's name; its version changes with the operands or attributes (jax.export)."""
    return f"jax_bnar_{operation}_{VERSION}"


def _register() -> frozenset[tuple[str, str]]:
    registered = set()
    for platform, module in modules.items():
        if platform == "CUDA" and driver_obstacle() is not None:
            continue
        for operation, handler in module.registrations()[platform].items():
            jax.ffi.register_ffi_target(target_name(operation), handler, platform=platform)
            registered.add((operation, _MLIR_PLATFORM[platform]))
    if native is not None and not any(platform == "cuda" for _, platform in registered):
        # XLA compiles calls only of targets that it knows. These end a run with the reason.
        refusing = native.missing_cuda_kernels("{}. Way out: {}".format(*_why_cuda_is_missing()))
        for operation, handler in refusing.items():
            jax.ffi.register_ffi_target(target_name(operation), handler, platform="CUDA")
    return frozenset(registered)


def _why_cuda_is_missing() -> Obstacle:
    """Why no CUDA kernel is registered, and the way out, for a program that calls one."""
    if cuda_load_error is not None:
        return Obstacle(*installation.why_no_cuda_module(cuda_load_error))
    return driver_obstacle() or Obstacle(
        f"this installation has no CUDA kernels ({why_no_cuda()})",
        f"install the wheel of {CUDA_DISTRIBUTION} of the same version (`make dist` builds both),"
        " or compile the program in pure JAX (JAX_BNAR_IMPLEMENTATION=xla)",
    )


def driver_obstacle() -> Obstacle | None:
    """Why the driver cannot load the CUDA kernels; None if it can, or if there are none."""
    if cuda_build is None:
        return None
    return cuda_images.driver_obstacle(cuda_build, cuda_driver.supported_cuda())


@functools.cache
def cuda_obstacle() -> Obstacle | None:
    """Why the GPUs of this machine cannot load the CUDA kernels.

    None if they can, if there are no CUDA kernels, and if there is no driver or no GPU: a program
    that is lowered for CUDA there is for another machine. This initialises the driver.
    """
    supported = cuda_driver.supported_cuda()
    if cuda_build is None or supported is None:
        return None
    devices = cuda_driver.devices()
    if not devices:
        return None
    return driver_obstacle() or cuda_images.devices_obstacle(cuda_build, supported, devices)


def obstacle(platform: str) -> Obstacle | None:
    """Why kernels that this installation has for a platform do not run here, or None."""
    return cuda_obstacle() if platform == "cuda" else None


def has_kernel(operation: str, platform: str) -> bool:
    """Whether this installation has a kernel for the platform, and this machine can load it."""
    return (operation, platform) in kernels and obstacle(platform) is None


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels use here, or None without a native module.

    Raises:
        ValueError: the environment variable JAX_BNAR_CPU_ISA names an instruction set that is
            unknown, or that this processor does not support.
    """
    return native.cpu_isa() if native else None


def huge_pages() -> bool:
    """Whether the CPU kernels ask this machine for huge pages for large results.

    Raises:
        ValueError: the environment variable JAX_BNAR_HUGE_PAGES is neither unset nor `0` nor `1`.
    """
    return bool(native and native.huge_pages())


def workspace_bytes(platform: str, groups: Any, rows: Any, channels: Any, inner: Any) -> Any:
    """Bytes of workspace, a hidden result, that a summing kernel needs for this canonical shape.

    It may be 0. If a size is symbolic (jax.export), the result is an upper bound.
    """
    xla_platform = XLA_PLATFORM[platform]
    module = _planners[xla_platform]
    sizes = (groups, rows, channels, inner)
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        return module.workspace_bytes(xla_platform, *map(int, sizes))
    bound, per_group, per_channel = module.workspace_bound(xla_platform)
    if bound == 0:
        return 0  # Zero times a symbol would be a symbolic size rather than 0.
    return bound + groups * (per_group + channels * per_channel)


def mask_channels(platform: str, canonical: CanonicalShape) -> int:
    """How many neighbouring channels of a row have their bits together in the kernels' masks.

    0 if the bits are in the order of the elements, as they always are if a size is symbolic.
    """
    if not all(isinstance(size, (int, np.integer)) for size in canonical):
        return 0
    xla_platform = XLA_PLATFORM[platform]
    return _planners[xla_platform].mask_channels(xla_platform, *map(int, canonical))


def cuda_abi() -> np.int64:
    """The attribute `abi` of calls for CUDA, by which kernels know how they are called."""
    return np.int64(_planners["CUDA"].cuda_abi())


def cuda_launches() -> dict[str, int]:
    """The number of launches of each CUDA kernel by each strategy since the process started."""
    for launches in _of_cuda_kernels("cuda_launches"):
        return launches()
    return {}


def forget_cuda_settings() -> None:
    """Lets the next call of a CUDA kernel read the variables `JAX_BNAR_CUDA_...` again."""
    for forget in _of_cuda_kernels("forget_cuda_settings"):
        forget()


def _of_cuda_kernels(name: str) -> Iterator[Callable[[], Any]]:
    """A function of the modules that have CUDA kernels."""
    # In tests, the emulated CUDA kernels replace the CPU kernels.
    for module in (cuda, native):
        if hasattr(module, name):
            yield getattr(module, name)


def why_no_cuda() -> str:
    """Why there are no CUDA kernels here, or an empty string if there are."""
    if cuda is not None:
        return ""
    if cuda_load_error is not None:
        return installation.why_no_cuda_module(cuda_load_error)[0]
    why_not_built = native.why_no_cuda() if native else ""
    missing = f"{CUDA_DISTRIBUTION} is not installed"
    return f"{why_not_built}, and {missing}" if why_not_built else missing


def why_no_kernel(operation: str, wanted: Collection[str] = ()) -> str:
    """Why there is no kernel on the platforms `wanted`: a clause for error messages."""
    if load_error is not None:
        return "; ".join(installation.why_no_native_module(load_error))
    for platform in wanted:
        unusable = obstacle(platform)
        if (operation, platform) in kernels and unusable is not None:
            return f"{unusable.reason} (way out: {unusable.way_out})"
    platforms = sorted(platform for name, platform in kernels if name == operation)
    because = "" if "cuda" in platforms else f" (none for cuda: {why_no_cuda()})"
    return (
        f"this installation has kernels for {', '.join(platforms) or 'no platform'} only{because}"
    )


# The (operation, MLIR platform) pairs whose kernels XLA knows. The driver is asked here but not its
# devices, which would have to be initialised at import. If they cannot load the kernels, programs
# are lowered without them (`cuda_obstacle`).
registered: Final = _register()
