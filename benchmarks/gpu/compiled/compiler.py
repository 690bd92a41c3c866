"""XLA's compiler for NVIDIA GPUs, which runs on machines without a GPU.

It comes with JAX's plugin for CUDA: the extra `gpu-compiler`.
"""

import importlib.metadata
import importlib.util
import pathlib
import shutil
from typing import Final

import jax

# Of the two wheels, the plugin registers the compiler, and pjrt contains it.
WHEELS: Final = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_PTXAS: Final = "nvidia-cuda-nvcc"


def why_none() -> str | None:
    """Why programs cannot be compiled for a GPU here, or None if they can."""
    for wheel in WHEELS:
        try:
            version = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"{wheel} is not installed: pip install --no-deps {wheel}=={jax.__version__}"
        if version != jax.__version__:
            return f"{wheel} has version {version}, and jax has {jax.__version__}"
    if not shutil.which("ptxas") and not any(
        (folder / "cu13" / "bin" / "ptxas").exists() for folder in _nvidia_folders()
    ):
        return f"ptxas was not found: pip install '{_PTXAS}==13.*'"
    return None


def _nvidia_folders() -> list[pathlib.Path]:
    """Where NVIDIA's wheels are installed."""
    nvidia = importlib.util.find_spec("nvidia")
    locations = nvidia.submodule_search_locations if nvidia else None
    return [pathlib.Path(path) for path in locations or []]


def prepare() -> None:
    """Sets JAX up to compile for GPUs of other machines; before JAX uses any device.

    Raises:
        SystemExit: the compiler is missing; says how to get it.
    """
    reason = why_none()
    if reason is not None:
        raise SystemExit(f"Programs cannot be compiled for a GPU here: {reason}.")
    # With other platforms, the plugin looks for the CUDA libraries and does not find them.
    jax.config.update("jax_platforms", "cpu")
    # A program from the cache would take no time, and have no text.
    jax.config.update("jax_enable_compilation_cache", False)


def versions() -> dict[str, str | None]:
    """The versions of what compiles."""
    return {name: _version(name) for name in (*WHEELS, _PTXAS)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
