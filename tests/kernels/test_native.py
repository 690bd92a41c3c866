"""Runs the kernels' C++ tests (tests/native) under sanitizers, and for aarch64 in an emulator."""

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import jax.ffi
import pytest
from checkout import ROOT
from native_build import aarch64_options, build, check_vectors, optional_tool, run, tool

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

REQUIRE_AARCH64 = "JAX_BNAR_REQUIRE_AARCH64"


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
@pytest.mark.timeout(3600)
def test_address_and_undefined_behaviour_sanitizer() -> None:
    run_tests(sanitize("address,undefined"), ".")


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_undefined_behaviour_sanitizer_with_every_check() -> None:
    programs = ["kernels_test", "random_shapes_test", "cuda_kernels_test"]
    run_tests(sanitize("undefined", programs), f"^({'|'.join(programs)})")


# Kernels differ between compute capabilities in what waits in registers. All other tests of the
# emulation run those for 9.0.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [800, pytest.param(1000, marks=pytest.mark.weekly)])
def test_kernels_for_other_gpus(capability: int) -> None:
    options = [f"-DJAX_BNAR_EMULATED_ARCHITECTURE={capability}"]
    directory = build(f"gpu-{capability}", options, ["cuda_kernels_test"])
    run_tests(directory, "^cuda_kernels_test_.*_1$")


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


# Nobody has an aarch64 machine for every change, so an emulator runs the programs. That takes
# minutes for each instruction set, and the two differ only in how bfloat16 is converted.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("isa", ["neonbf16", pytest.param("baseline", marks=pytest.mark.weekly)])
def test_kernels_under_emulated_aarch64(isa: str) -> None:
    emulator = optional_tool("qemu-aarch64", "qemu-user", REQUIRE_AARCH64)
    libraries = "/usr/aarch64-linux-gnu"
    options = [*aarch64_options(), f"-DCMAKE_CROSSCOMPILING_EMULATOR={emulator};-L;{libraries}"]
    of_isa = ("kernels_test", "random_shapes_test", "half_test", "curves_test")
    others = ("plan_test", "executor_test")
    pattern = f"^({'|'.join(of_isa)})(_[12])?_{isa}$|^({'|'.join(others)})$"
    run_tests(build("aarch64", options, (*of_isa, *others)), pattern)


@pytest.mark.timeout(1800)
def test_every_kernel_for_aarch64_keeps_its_vectors_in_registers() -> None:
    check_vectors(build("aarch64", aarch64_options(), ["bnar_cpu"]), ["baseline", "neonbf16"])


def test_cuda_emulation_compiles_for_aarch64() -> None:
    """Builds all native tests, so that everything is linked."""
    build("aarch64", aarch64_options())


@pytest.mark.parametrize(
    "source", ["python_module/ffi_api_version.cc", "native/ffi_call.cc", "cpu/ffi_handlers.cc"]
)
def test_handlers_compile_for_aarch64(source: str) -> None:
    compiler = optional_tool("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu", REQUIRE_AARCH64)
    run(
        compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
        f"-I{ROOT}", "-isystem", jax.ffi.include_dir(), ROOT / source,
    )  # fmt: skip
