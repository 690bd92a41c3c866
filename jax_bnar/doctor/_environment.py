"""Collects versions and facts about the machine without starting a JAX backend."""

import ctypes
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Callable
from typing import TypeVar

import jax
import jaxlib.version
import numpy as np

import jax_bnar
from jax_bnar._kernels import targets
from jax_bnar.doctor import _processes
from jax_bnar.doctor._report import Build, Machine, Versions

_T = TypeVar("_T")

_NVIDIA_SMI_SECONDS = 20
_DRIVER_FILE = pathlib.Path("/proc/driver/nvidia/version")
_CUDA_PLUGINS = tuple(f"jax-cuda{version}-plugin" for version in (12, 13))
_CUDA_PACKAGES = (
    *_CUDA_PLUGINS,
    *(f"jax-cuda{version}-pjrt" for version in (12, 13)),
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
)
_VARIABLES = re.compile(
    r"(JAX|XLA)_\w+|CUDA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)|MALLOC_\w+|GLIBC_TUNABLES"
)
_ADVICE = 'the guide\'s page "Measuring" has three lines that make them faster'


def build() -> Build:
    error = targets.load_error
    native = targets.native
    cuda_error, cuda = targets.cuda_load_error, targets.cuda_build
    return Build(
        native_module=None if native is None else native.__file__,
        load_error=None if error is None else f"{type(error).__name__}: {error}",
        ffi_api_version=None if native is None else native.ffi_api_version(),
        cuda_module=None if targets.cuda is None else targets.cuda.__file__,
        cuda_load_error=None
        if cuda_error is None
        else f"{type(cuda_error).__name__}: {cuda_error}",
        cuda_version=None if cuda is None else "{}.{}".format(*cuda.toolkit),
        cuda_abi=None if native is None else native.cuda_abi(),
        cuda_architectures=() if cuda is None else cuda.images(),
    )


def versions_and_machine() -> tuple[Versions, Machine]:
    driver, gpus = _nvidia()
    versions = Versions(
        jax_bnar=jax_bnar.__version__,
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        numpy=np.__version__,
        python=platform.python_version(),
        cuda_packages=_installed(_CUDA_PACKAGES),
        nvidia_driver=driver,
    )
    machine = Machine(
        system=platform.platform(),
        architecture=platform.machine(),
        cpu_count=_usable_cpus(),
        cpu_isa=_unless_refused(targets.cpu_isa),
        huge_pages=_unless_refused(targets.huge_pages),
        gpus=gpus,
        nvcc=shutil.which("nvcc"),
        allocator=_allocator(),
        environment_variables={
            name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)
        },
    )
    return versions, machine


def _allocator() -> str:
    """The malloc of this process, and whether it keeps what was freed (Linux)."""
    try:
        process = ctypes.CDLL(None)
    except (OSError, TypeError):
        return "unknown"
    for name, symbol in (
        ("jemalloc", "mallctl"),
        ("tcmalloc", "MallocExtension_GetNumericProperty"),
    ):
        if hasattr(process, symbol):
            return name
    if not hasattr(process, "gnu_get_libc_version"):
        return "of the system"
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    keeps = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"} & os.environ.keys()
    if not keeps and "mmap_threshold" not in tunables:
        return f"glibc, where large results get fresh pages: on the CPU {_ADVICE}"
    one_arena = re.search(r"\barena_max=1\b", tunables) is not None
    if os.environ.get("MALLOC_ARENA_MAX") != "1" and not one_arena:
        return (
            "glibc, which keeps large blocks, but not those of XLA's threads as long as"
            f" MALLOC_ARENA_MAX is not 1: {_ADVICE}"
        )
    return "glibc, which keeps large blocks"


def has_cuda_plugin(versions: Versions) -> bool:
    return any(name in versions.cuda_packages for name in _CUDA_PLUGINS)


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _unless_refused(setting: Callable[[], _T]) -> _T | None:
    try:
        return setting()
    except ValueError:  # The report lists this error as a problem.
        return None


def _usable_cpus() -> int | None:
    # macOS has no os.sched_getaffinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _nvidia() -> tuple[str | None, tuple[str, ...]]:
    """The driver's version and the GPUs; if nvidia-smi fails, the version from /proc only."""
    command = (
        "nvidia-smi",
        "--query-gpu=driver_version,name,memory.total",
        "--format=csv,noheader",
    )
    finished = _processes.run(command, timeout=_NVIDIA_SMI_SECONDS)
    lines = tuple(line.strip() for line in finished.stdout.splitlines() if line.strip())
    if finished.problem is None and lines:
        return lines[0].partition(",")[0], tuple(line.partition(", ")[2] for line in lines)
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)", _DRIVER_FILE.read_text())
    except OSError:
        return None, ()
    return (found[1] if found else None), ()
