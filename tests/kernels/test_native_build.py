"""What a build from the sources does where the machine is not as usual."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from checkout import ROOT
from native_build import ENVIRONMENT, run, tool

pytestmark = pytest.mark.one_python

# As <stdlib.h> declares them from glibc 2.38 on, and as libstdc++.a of such a machine calls them.
NEW_GLIBC = """
extern "C" long __isoc23_strtol(const char*, char**, int);
extern "C" long long __isoc23_strtoll(const char*, char**, int);
extern "C" unsigned long __isoc23_strtoul(const char*, char**, int);
extern "C" unsigned long long __isoc23_strtoull(const char*, char**, int);
extern "C" __attribute__((visibility("default"))) long long Sum(const char* text) {
  const auto rest = __isoc23_strtoul(text, nullptr, 10) + __isoc23_strtoull(text, nullptr, 16);
  return __isoc23_strtol(text, nullptr, 8) + __isoc23_strtoll(text, nullptr, 10) +
         static_cast<long long>(rest);
}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_wheel_needs_no_function_of_a_new_glibc(tmp_path: pathlib.Path) -> None:
    """auditwheel would refuse it, and no older distribution could load it."""
    source, library = tmp_path / "new_glibc.cc", tmp_path / "new_glibc.so"
    source.write_text(NEW_GLIBC)
    run(
        os.environ.get("CXX", "g++"), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC",
        "-shared", "-fvisibility=hidden", "-Wl,-z,defs", "-o", library,
        source, ROOT / "python_module/manylinux.cc",
    )  # fmt: skip
    assert ctypes.CDLL(str(library)).Sum(b"17") == 15 + 17 + 17 + 0x17
    nm = shutil.which("nm")
    if nm is not None:
        command = [nm, "--dynamic", "--undefined-only", library]
        needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "strtoul" in needed
        assert "isoc23" not in needed


def configured(folder: pathlib.Path, nvcc: str, **defined: str) -> subprocess.CompletedProcess[str]:
    """Configures a build on a machine with a GPU and this program as its nvcc."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("nvidia-smi", "#!/bin/sh\n"), ("nvcc", f"#!/bin/sh\n{nvcc}\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    without = ("CUDACXX", "CUDAARCHS", "CUDA_PATH", "CUDA_HOME", "CMAKE_CUDA_COMPILER_LAUNCHER")
    environment = {k: v for k, v in ENVIRONMENT.items() if k not in without}
    path = os.pathsep.join([str(programs), environment["PATH"]])
    options = [f"-D{name}={value}" for name, value in defined.items()]
    return subprocess.run(
        [
            tool("cmake"), "-S", ROOT, "-B", folder / "build", "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}",
            *options,
        ],
        env=environment | {"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        ("exit 1", "no working nvcc was found"),
        (
            'echo "Cuda compilation tools, release 12.4, V12.4.131"',
            "nvcc was of CUDA 12.4 when it was built, and 12.8 is the first that knows the"
            " architectures 10.0 and 12.0",
        ),
    ],
    ids=["broken", "old"],
)
def test_an_nvcc_that_is_of_no_use_costs_the_cuda_kernels_alone(
    tmp_path: pathlib.Path, nvcc: str, reason: str
) -> None:
    finished = configured(tmp_path, nvcc)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"jax_bnar: no CUDA kernels, {reason}" in finished.stdout


@pytest.mark.slow
def test_an_old_nvcc_is_named_where_it_must_do(tmp_path: pathlib.Path) -> None:
    finished = configured(tmp_path, 'echo "Cuda, release 12.4, V12.4.131"', JAX_BNAR_CUDA="ON")
    assert finished.returncode != 0
    printed = " ".join(finished.stderr.split())
    assert "is of CUDA 12.4, and 12.8 is the first that knows" in printed
    assert "CUDAARCHS='80-real;90'" in printed


@pytest.mark.parametrize("named", [True, False], ids=["by PYTHON", "not"])
def test_the_named_python_is_the_first_that_is_tried(named: bool) -> None:
    version = "{}.{}".format(*sys.version_info)
    environment = os.environ | {"PYTHON": sys.executable if named else "no-such-python"}
    finished = subprocess.run(
        [ROOT / ".ci/find_python", version], env=environment, capture_output=True, text=True
    )
    if named:
        assert finished.stdout.strip() == sys.executable
    other = subprocess.run([ROOT / ".ci/find_python", "3.1"], env=environment, capture_output=True)
    assert other.returncode == 1
