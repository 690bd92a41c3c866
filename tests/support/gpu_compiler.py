"""XLA's compiler for NVIDIA GPUs, which runs on machines without a GPU.

It comes with JAX's plugin for CUDA, two wheels that the tests do not ask for.
"""

import importlib.metadata
import importlib.util
import pathlib
import re
import shutil

import jax
from checkout import ROOT
from subprocesses import run_python

# Of the two, the plugin registers the compiler, and pjrt contains it.
_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")

_PRELUDE = """
import re

import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable, topologies
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import jax_bnar

H200 = {h200!r}

def h200s(number):
    topology = f"1x1x{{number}}"
    found = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=topology)
    return found.devices
"""


def why_none() -> str | None:
    """Why programs cannot be compiled for a GPU here, or None if they can."""
    for wheel in _WHEELS:
        try:
            version = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"{wheel} is not installed: pip install --no-deps {wheel}=={jax.__version__}"
        if version != jax.__version__:
            return f"{wheel} has version {version}, and jax has {jax.__version__}"
    nvidia = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(path) for path in (nvidia.submodule_search_locations or [])] if (
        nvidia
    ) else []  # fmt: skip
    if not shutil.which("ptxas") and not any(
        (folder / "cu13" / "bin" / "ptxas").exists() for folder in folders
    ):
        return "ptxas was not found: pip install nvidia-cuda-nvcc"
    return None


def run_with_gpu_compiler(code: str, *, timeout: float) -> str:
    """Runs `code` with the function h200s, which returns devices that can only be compiled for."""
    page = (ROOT / "docs" / "guide" / "ahead_of_time.md").read_text()
    found = re.search(r'^H200 = """(.*?)"""', page, re.DOTALL | re.MULTILINE)
    assert found is not None
    return run_python(code, timeout=timeout, prelude=_PRELUDE.format(h200=found[1]))
