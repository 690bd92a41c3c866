"""What the NVIDIA driver of this machine answers: the CUDA that it supports, and its GPUs."""

import ctypes
import functools
from typing import Final, NamedTuple

# XLA loads the driver under the same name, and so finds the same file.
_LIBRARY: Final = "libcuda.so.1"
# Of the enumeration CUdevice_attribute.
_COMPUTE_CAPABILITY_MAJOR: Final = 75
_COMPUTE_CAPABILITY_MINOR: Final = 76
_NAME_BYTES: Final = 256

Version = tuple[int, int]


class Device(NamedTuple):
    """A GPU that this process may use; its compute capability 9.0 is (9, 0)."""

    name: str
    capability: Version


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


@functools.cache
def supported_cuda() -> Version | None:
    """(major, minor) of the newest CUDA that the driver supports, or None without a driver.

    This initialises nothing, so `import jax_bnar` may ask it: CUDA_VISIBLE_DEVICES may still be set
    afterwards, and the process may still fork.
    """
    library, version = _library(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def devices() -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible; none if the driver does not start.

    This initialises the driver, as XLA does before it runs the first program on a GPU.
    """
    library, count = _library(), ctypes.c_int()
    if library is None or library.cuInit(0) != 0:
        return ()
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = (_device(library, ordinal) for ordinal in range(count.value))
    return tuple(device for device in found if device is not None)


def _device(library: ctypes.CDLL, ordinal: int) -> Device | None:
    handle = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
        return None
    name = ctypes.create_string_buffer(_NAME_BYTES)
    library.cuDeviceGetName(name, _NAME_BYTES, handle)
    numbers = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        number = ctypes.c_int()
        if library.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle) != 0:
            return None
        numbers.append(number.value)
    return Device(name.value.decode(errors="replace"), (numbers[0], numbers[1]))
