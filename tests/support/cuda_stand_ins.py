"""Stand-ins for the distribution jax-bnar-cuda13 and for the NVIDIA driver, for subprocesses.

The handlers of the stand-in are not called, as lowering needs no GPU. The driver answers what
`driver` is told (tests/cuda_driver_stand_in).
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

from checkout import ROOT
from native_build import run as run_tool
from native_build import tool
from subprocesses import python_path

STAND_IN = """
from jax_bnar import _native

def registrations():
    stages = lambda: {"initialize": _native.ffi_api_probe(), "execute": _native.ffi_api_probe()}
    return {"CUDA": {name: stages() for name in _native.registrations()["cpu"]}}

def workspace_bytes(platform, groups, rows, channels, inner):
    return 12345

def workspace_bound(platform):
    return 12345, 0, 0

def mask_channels(platform, groups, rows, channels, inner):
    return 0

def cuda_abi():
    return _native.cuda_abi()

def cuda_version():
    return 13, 0

def cuda_architectures():
    return [80, 90]

def cuda_ptx_architectures():
    return [90]

def cuda_launches():
    return {"Forward on_chip": 7}
"""
LOWER = """
import warnings
import numpy as np
import jax
import jax_bnar
from jax_bnar._kernels import targets

x = np.ones((8, 3), np.float32)

def lowered(platform):
    operator = jax.jit(lambda x: jax_bnar.bn_relu(x, None, None).y)
    return operator.trace(x).lower(lowering_platforms=(platform,)).as_text()
"""


def run(
    folder: pathlib.Path,
    code: str,
    *options: str,
    own_cuda: bool = False,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs Python with `folder` on its path, and without CUDA kernels built from the sources."""
    block = "" if own_cuda else "import sys\nsys.modules['jax_bnar._cuda'] = None\n"
    (folder / "sitecustomize.py").write_text(block)
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("JAX_BNAR") and k not in ("PYTHONWARNINGS", "JAX_PLATFORMS")
    }
    return subprocess.run(
        [sys.executable, *options, *(["-c", code] if code else [])],
        env=inherited
        | {"PYTHONPATH": python_path(folder), "JAX_PLATFORMS": "cpu"}
        | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )


def install(folder: pathlib.Path, version: str, module: str) -> None:
    """Makes a jax-bnar-cuda13 of this version, with `module` as the source of its module."""
    package = folder / "jax_bnar_cuda13"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "_cuda.py").write_text(module)


def build_driver(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the stand-in for libcuda.so.1 and returns the folder that has it."""
    source = ROOT / "tests" / "cuda_driver_stand_in" / "libcuda.cc"
    compiler = os.environ.get("CXX") or tool("g++")
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    run_tool(compiler, *options, source, "-o", folder / "libcuda.so.1")
    return folder


def driver(folder: pathlib.Path, cuda: str, gpus: str) -> dict[str, str]:
    """The environment in which the driver supports `cuda` ("13.0") and has `gpus` ("7.5 9.0")."""
    major, minor = map(int, cuda.split("."))
    path = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    return {
        "LD_LIBRARY_PATH": path,
        "STAND_IN_CUDA": str(1000 * major + 10 * minor),
        "STAND_IN_GPUS": gpus,
    }
