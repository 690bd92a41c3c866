"""Finds oneDNN's library and loads it, for the peers that call oneDNN's C API."""

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.common.environment import core_count
from benchmarks.sites.peers import UnavailableError

VARIABLE: Final = "JAX_BNAR_ONEDNN_LIBRARY"
_API: Final = 3
_NAME: Final = "libdnnl.so.3"
_WAY_OUT: Final = f"pip install onednn-cpu-gomp, or name {_NAME} in {VARIABLE}"
# What oneDNN calls its CPU runtimes and instruction sets (dnnl_config.h and dnnl_cpu_isa_t).
_RUNTIMES: Final = {1: "sequential", 2: "OpenMP", 4: "TBB", 8: "threadpool", 512: "SYCL"}
_ISAS: Final = {
    0x1: "SSE41",
    0x3: "AVX",
    0x7: "AVX2",
    0xF: "AVX2_VNNI",
    0x1F: "AVX2_VNNI_2",
    0x27: "AVX512_CORE",
    0x67: "AVX512_CORE_VNNI",
    0xE7: "AVX512_CORE_BF16",
    0x1EF: "AVX512_CORE_FP16",
    0xFEF: "AVX512_CORE_AMX",
    0x1FEF: "AVX512_CORE_AMX_FP16",
}


class _Version(ctypes.Structure):
    """dnnl_version_t."""

    _fields_ = (
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


class _Found(NamedTuple):
    path: str
    origin: str


@functools.cache
def load() -> ctypes.CDLL:
    """oneDNN, with as many threads as this process has cores.

    Its OpenMP threads wait as libgomp lets them by default: they spin for a few milliseconds after
    a primitive and then sleep. Each sample of the benchmark is preceded by longer untimed calls, so
    they do not take the next peer's cores. OMP_WAIT_POLICY=passive would let the threads sleep
    between the primitives of one step, at oneDNN's expense, and it would change PyTorch, too.

    Raises:
        UnavailableError: it is not installed, does not load, or has an API of another version.
    """
    path = _find().path
    try:
        paddles = _library_of_paddle()
        if paddles is not None:
            # The library below may be another one of the same name. Paddle, imported later, would
            # be linked to that one if its own were not there first.
            ctypes.CDLL(str(paddles))
        library = ctypes.CDLL(path)
        library.dnnl_version.restype = ctypes.POINTER(_Version)
        version = library.dnnl_version().contents
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"oneDNN does not load: {error}") from error
    if version.major != _API:
        raise UnavailableError(
            f"this is oneDNN {version.major}.{version.minor}.{version.patch}, and the peer uses the"
            f" API of oneDNN {_API}; {_WAY_OUT}"
        )
    if hasattr(library, "omp_set_num_threads"):  # a function of the OpenMP that it is linked to
        library.omp_set_num_threads(core_count())
    return library


def describe() -> dict[str, str] | None:
    """Which oneDNN it is, its threads, and the best instruction set that it uses; None without."""
    try:
        version = load().dnnl_version().contents
    except UnavailableError:
        return None
    return {
        "version": f"{version.major}.{version.minor}.{version.patch}",
        "origin": _find().origin,
        "runtime": _RUNTIMES.get(version.cpu_runtime, str(version.cpu_runtime)),
        "isa": isa(),
    }


def isa() -> str:
    """The best instruction set that oneDNN uses here; ONEDNN_MAX_CPU_ISA limits it."""
    found = load().dnnl_get_effective_cpu_isa()
    return _ISAS.get(found, hex(found))


def _find() -> _Found:
    named = os.environ.get(VARIABLE)
    if named:
        return _Found(named, VARIABLE)
    places = (
        (_library_of_paddle(), "Paddle's wheel"),
        (Path(sys.prefix, "lib", _NAME), "oneDNN's wheel"),
    )
    for path, origin in places:
        if path is not None and path.exists():
            return _Found(str(path), origin)
    of_the_system = ctypes.util.find_library("dnnl")
    if of_the_system is None:
        raise UnavailableError(f"oneDNN is not installed; {_WAY_OUT}")
    return _Found(of_the_system, "the system")


def _library_of_paddle() -> Path | None:
    """oneDNN in Paddle's wheel, which need not be imported for it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "libs" / _NAME
    return path if path.exists() else None
