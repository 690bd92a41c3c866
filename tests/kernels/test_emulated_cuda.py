"""Runs the operators' oracle tests, unchanged, on the CUDA kernels in the host emulation.

A second pytest replaces the package's native module by one whose kernels for "cpu" are the emulated
ones (tests/emulated_module). These tests cover the numerics: hypothesis's grid, exact fill, special
values, gradients. tests/native/cuda_kernels_test.cc covers the strategies, under sanitizers.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from checkout import ROOT, TESTS
from native_build import ENVIRONMENT, run, tool

from benchmarks.gpu.plan import ORACLE_TESTS

pytestmark = [pytest.mark.one_python, pytest.mark.slow]


@pytest.fixture(scope="module")
def native_module() -> pathlib.Path:
    directory = ROOT / "build" / "emulated-module"
    (directory / "CMakeCache.txt").unlink(missing_ok=True)
    run(
        tool("cmake"), "-S", ROOT, "-B", directory, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}",
        "-DJAX_BNAR_CUDA=OFF", "-DJAX_BNAR_EMULATED_MODULE=ON",
        "-DJAX_BNAR_WARNINGS_AS_ERRORS=ON",
    )  # fmt: skip
    run(tool("cmake"), "--build", directory, "--target", "bnar_emulated_native")
    (module,) = (directory / "tests/emulated_module").glob("_native*.so")
    return module


def run_tests(module: pathlib.Path, *names: str, options: tuple[str, ...] = ()) -> str:
    """Returns what pytest prints for these tests on the emulated kernels, which must pass."""
    finished = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0",
            *options, *(str(TESTS / name) for name in names),
        ],
        cwd=ROOT,
        env=ENVIRONMENT | {"JAX_BNAR_TEST_NATIVE_MODULE": str(module)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.mark.timeout(1200)
def test_masks_have_a_layout_of_their_own(native_module: pathlib.Path) -> None:
    printed = run_tests(native_module, "kernels/test_mask_layout.py")
    assert "skipped" not in printed, printed[-500:]


@pytest.mark.timeout(1200)
def test_calls_have_a_version_that_kernels_check(native_module: pathlib.Path) -> None:
    chosen = ("-k", "with_and_without_a_version")
    printed = run_tests(native_module, "kernels/test_ahead_of_time.py", options=chosen)
    assert "1 passed" in printed, printed[-500:]


@pytest.mark.timeout(1800)
def test_oracle_tests_pass_on_emulated_kernels(native_module: pathlib.Path) -> None:
    # Pure JAX does not use the kernels.
    printed = run_tests(native_module, *ORACLE_TESTS, options=("-k", "not xla"))
    assert int(printed.rsplit(" passed", 1)[0].split()[-1]) > 300


@pytest.mark.timeout(1200)
def test_other_activations_pass_on_emulated_kernels(native_module: pathlib.Path) -> None:
    printed = run_tests(native_module, "operators/test_activations.py", options=("-k", "not xla"))
    assert int(printed.rsplit(" passed", 1)[0].split()[-1]) > 150


def test_emulated_kernels_are_what_runs(native_module: pathlib.Path) -> None:
    """Triggers an error that only the CUDA code raises."""
    program = (
        "import conftest, jax.numpy as jnp, jax_bnar\n"
        "x = jnp.ones((4, 8), jnp.float32)\n"
        "jax_bnar.batch_norm(x, None, None, implementation='ffi').y.block_until_ready()\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TESTS,
        env=ENVIRONMENT
        | {
            "JAX_BNAR_TEST_NATIVE_MODULE": str(native_module),
            "JAX_BNAR_CUDA_STRATEGY": "fastest",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
        capture_output=True,
        text=True,
    )
    assert finished.returncode != 0
    assert "JAX_BNAR_CUDA_STRATEGY must be" in finished.stderr


@pytest.mark.timeout(1200)
def test_tests_for_a_gpu_pass_on_emulated_kernels(native_module: pathlib.Path) -> None:
    """Runs `make gpu`'s tests of every strategy, with the tiny shapes of its dry run."""
    finished = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu",
            str(TESTS / "gpu" / "test_gpu.py"),
        ],
        cwd=ROOT,
        env=ENVIRONMENT
        | {
            "JAX_BNAR_TEST_NATIVE_MODULE": str(native_module),
            "JAX_BNAR_GPU_PLATFORM": "cpu",
            "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    assert int(finished.stdout.rsplit(" passed", 1)[0].split()[-1]) > 100
