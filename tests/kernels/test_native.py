"""Runs the kernels' C++ tests (tests/native) under sanitizers, and compiles them for aarch64."""

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import jax.ffi
import pytest
from checkout import ROOT
from native_build import run, tool

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

REQUIRE_AARCH64 = "JAX_BNAR_REQUIRE_AARCH64"


def build(name: str, options: Sequence[str], targets: Sequence[str] = ()) -> pathlib.Path:
    """Configures and builds in build/native-NAME, which keeps objects between runs."""
    directory = ROOT / "build" / f"native-{name}"
    # Discard what an older CMake, ninja or compiler has cached.
    (directory / "CMakeCache.txt").unlink(missing_ok=True)
    run(
        tool("cmake"), "-S", ROOT, "-B", directory, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        "-DJAX_BNAR_MODULE=OFF", "-DJAX_BNAR_NATIVE_TESTS=ON",
        "-DJAX_BNAR_WARNINGS_AS_ERRORS=ON", *options,
    )  # fmt: skip
    run(tool("cmake"), "--build", directory, *(f"--target={target}" for target in targets))
    return directory


def sanitize(sanitizers: str, targets: Sequence[str] = ()) -> pathlib.Path:
    return build(
        sanitizers.replace(",", "-"),
        [
            f"-DJAX_BNAR_SANITIZE={sanitizers}",
            "-DCMAKE_BUILD_TYPE=None",
            "-DCMAKE_CXX_FLAGS=-Og",
        ],
        targets,
    )


def run_tests(directory: pathlib.Path, pattern: str, prefix: Sequence[str] = ()) -> None:
    run(
        *prefix, tool("ctest"), "--output-on-failure", "--no-tests=error",
        "--parallel", str(os.cpu_count() or 1), "--tests-regex", pattern,
        directory=directory,
    )  # fmt: skip


# This takes minutes on a slow machine, most of them for compiling.
@pytest.mark.timeout(1800)
def test_address_and_undefined_behaviour_sanitizer() -> None:
    run_tests(sanitize("address,undefined"), ".")


def without_address_randomisation() -> Sequence[str]:
    """A prefix for ThreadSanitizer, which fails if the kernel randomises too many bits."""
    prefix = ("setarch", "--addr-no-randomize")
    if shutil.which("setarch") is None:
        return ()
    works = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if works else ()


def test_thread_sanitizer() -> None:
    directory = sanitize("thread", ["executor_test"])
    run_tests(directory, "^executor_test$", without_address_randomisation())


@pytest.fixture(scope="module")
def aarch64_compiler() -> str:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        message = "aarch64-linux-gnu-g++ is missing (Debian: g++-aarch64-linux-gnu)"
        if os.environ.get(REQUIRE_AARCH64):
            pytest.fail(f"{message}, and {REQUIRE_AARCH64} is set", pytrace=False)
        pytest.skip(message)
    return compiler


def test_kernels_compile_for_aarch64(aarch64_compiler: str) -> None:
    """Builds the native tests too, so that everything is linked."""
    build(
        "aarch64",
        [
            "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
            f"-DCMAKE_CXX_COMPILER={aarch64_compiler}",
        ],
    )


@pytest.mark.parametrize(
    "source", ["native/ffi_api_version.cc", "native/ffi_call.cc", "cpu/ffi_handlers.cc"]
)
def test_handlers_compile_for_aarch64(aarch64_compiler: str, source: str) -> None:
    run(
        aarch64_compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
        f"-I{ROOT}", "-isystem", jax.ffi.include_dir(), ROOT / source,
    )  # fmt: skip
