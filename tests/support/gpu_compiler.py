"""XLA's compiler for NVIDIA GPUs in a process of its own, and what a test does without it.

`make .venv/gpu-compiler` installs it into a folder that only such processes have on their path:
where JAX finds the plugin, it looks for CUDA in every process, and complains that there is none.
"""

import functools
import os
import sys

import pytest
from checkout import ROOT, TESTS
from subprocesses import run_python

from benchmarks.gpu.compiled import compiler

REQUIRE = "JAX_BNAR_REQUIRE_GPU_COMPILER"
_FOLDER = str(ROOT / ".venv" / "gpu-compiler")

# Before anything of JAX is used.
ON_THE_PATH = f"import sys\nsys.path.append({_FOLDER!r})\n"

_PRELUDE = f"""{ON_THE_PATH}
import re

import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

sys.path += [{str(TESTS / "support")!r}, {str(ROOT)!r}]
import jax_bnar
from benchmarks.gpu.compiled import targets

def h200s(number):
    return list(targets.mesh_of("h200", number).devices.flat)
"""


def require() -> None:
    """Skips the test without the compiler, or fails where the environment requires it."""
    reason = _why_none()
    if reason is None:
        return
    if os.environ.get(REQUIRE):
        pytest.fail(f"{REQUIRE} is set, and {reason}")
    pytest.skip(f"{reason}, or make .venv/gpu-compiler")


@functools.cache
def _why_none() -> str | None:
    sys.path.append(_FOLDER)
    try:
        return compiler.why_none()
    finally:
        sys.path.remove(_FOLDER)


def run_with_gpu_compiler(code: str, *, timeout: float) -> str:
    """Runs `code` with the function h200s, which returns devices that can only be compiled for."""
    return run_python(code, timeout=timeout, prelude=_PRELUDE)
