"""Compiles programs that need no JAX, with nvcc alone."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.cuda_tool import find_cuda_tool

ROOT: Final = Path(__file__).parents[3]
_SOURCES: Final = (
    "benchmarks/gpu/micro/main.cu", "cuda/host/tiling.cc", "cuda/host/workspace.cc",
)  # fmt: skip


def find_nvcc() -> str | None:
    """Of a toolkit, or of the wheels of CUDA 13."""
    found = find_cuda_tool("nvcc")
    wheels = importlib.util.find_spec("nvidia")
    folders = [] if wheels is None else wheels.submodule_search_locations or []
    return found or shutil.which(
        "nvcc", path=os.pathsep.join(f"{folder}/cu13/bin" for folder in folders)
    )


def require_nvcc(found: str | None) -> str:
    """What find_nvcc() has found.

    Raises:
        RuntimeError: nothing.
    """
    if found is None:
        raise RuntimeError("nvcc is neither on PATH, nor in CUDA_HOME, nor in a wheel")
    return found


def compile_micro(nvcc: str, program: Path, architecture: str) -> None:
    """Compiles and links the microbenchmark.

    Raises:
        RuntimeError: nvcc failed; the message is what it printed.
    """
    compile_program(nvcc, [ROOT / source for source in _SOURCES], program, architecture)


def compile_program(
    nvcc: str, inputs: Sequence[Path], program: Path, architecture: str, *, link: bool = True
) -> None:
    """Compiles and links sources and libraries; warnings and spills are errors.

    Without link, one source is compiled to an object, which needs no library.

    Raises:
        RuntimeError: nvcc failed; the message is what it printed.
    """
    argv = [
        nvcc, "-std=c++17", "-O3", f"-arch={architecture}", "-lineinfo", f"-I{ROOT}",
        "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror",
        "-Xptxas=-warn-spills,-Werror", *([] if link else ["-c"]), *map(str, inputs),
        "-o", str(program),
    ]  # fmt: skip
    finished = subprocess.run(argv, capture_output=True, text=True)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}\n{finished.stdout}{finished.stderr}")
