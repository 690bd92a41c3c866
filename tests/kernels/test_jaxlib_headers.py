"""The sources compile against the FFI headers of the jaxlib that is installed.

Isolated builds take the headers of the oldest supported jaxlib. Builds without isolation take those
of the installed one, and jaxlib renames what is in them: 0.11.2 did so with the base of extensions.
"""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sysconfig

import jax
import nanobind
import pytest
from checkout import ROOT

pytestmark = pytest.mark.quick

# Those that see the headers, and the macros that CMake defines for them.
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu/ffi_handlers.cc": (),
    "cuda/ffi_handlers.cc": (),
    "native/cuda_abi.cc": ('JAX_BNAR_VERSION="0.0"',),
    "native/ffi_call.cc": (),
    "python_module/cuda_module.cc": ("JAX_BNAR_CUDA_PTX=90",),
    "python_module/ffi_api_version.cc": (),
    "python_module/missing_cuda.cc": (),
    "python_module/native_module.cc": ('JAX_BNAR_WHY_NO_CUDA=""',),
}


@pytest.fixture(scope="module")
def compiler() -> str:
    version = importlib.metadata.version("jaxlib")
    if f'"jaxlib=={version}"' in (ROOT / "pyproject.toml").read_text():
        pytest.skip(f"the module has been compiled against the headers of jaxlib {version}")
    if not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("Python's headers are missing (Debian: python3-dev)")
    return shutil.which("c++") or pytest.skip("there is no C++ compiler")


@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_a_warning(compiler: str, source: str) -> None:
    headers = (
        jax.ffi.include_dir(),
        nanobind.include_dir(),
        sysconfig.get_path("include"),
        str(ROOT / "tests/cuda_emulation/include"),
    )
    command = [
        compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}",
        *(f"-isystem{folder}" for folder in headers),
        *(f"-D{macro}" for macro in SOURCES[source]), str(ROOT / source),
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]
