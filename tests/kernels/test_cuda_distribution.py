"""How `import jax_bnar` finds jax-bnar-cuda13: present, missing, broken, mismatched.

A stand-in replaces jax-bnar-cuda13. Its handlers are not called, as lowering needs no GPU.
"""

import json
import pathlib

import pytest
from cuda_stand_ins import LOWER, STAND_IN, driver, install, run

import jax_bnar
from jax_bnar._kernels import targets

pytestmark = pytest.mark.slow


def test_its_kernels_are_found(tmp_path: pathlib.Path) -> None:
    install(tmp_path, jax_bnar.__version__, STAND_IN)
    code = """
assert "custom_call @jax_bnar_forward_v1" in lowered("cuda")
assert "12345xui8" in lowered("cuda")
assert "xui8" not in lowered("cpu")
assert "custom_call @jax_bnar_forward_v1" in lowered("cpu")
assert targets.why_no_cuda() == ""
assert targets.cuda_launches() == {"Forward on_chip": 7}
"""
    finished = run(tmp_path, LOWER + code, "-W", "error")
    assert finished.returncode == 0, finished.stderr


def test_the_doctor_names_its_module(tmp_path: pathlib.Path) -> None:
    install(tmp_path, jax_bnar.__version__, STAND_IN)
    finished = run(tmp_path, "", "-m", "jax_bnar.doctor", "--json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(finished.stdout)
    assert found["build"]["cuda_module"] == str(tmp_path / "jax_bnar_cuda13" / "_cuda.py")
    assert found["build"]["cuda_version"] == "13.0"
    assert found["build"]["cuda_architectures"] == ["sm_80", "sm_90", "PTX for 9.0 and newer"]
    assert "forward" in found["platforms"]["cuda"]["kernels"]


def test_without_it_there_are_cpu_kernels_alone(
    tmp_path: pathlib.Path, stand_in_driver: pathlib.Path
) -> None:
    """A GPU of this machine runs pure JAX; a program for another machine calls the kernels."""
    block = "import sys\nsys.modules['jax_bnar_cuda13'] = None\n"
    code = """
assert targets.why_no_cuda().endswith("jax-bnar-cuda13 is not installed"), targets.why_no_cuda()
assert ("forward", "cuda") not in targets.registered
assert "custom_call @jax_bnar_forward_v1" in lowered("cpu")
"""
    elsewhere = 'assert "custom_call @jax_bnar_forward_v1" in lowered("cuda")\n'
    finished = run(tmp_path, block + LOWER + code + elsewhere, "-W", "error")
    assert finished.returncode == 0, finished.stderr
    here = """
assert "custom_call @jax_bnar" not in lowered("cuda")
try:
    jax.jit(lambda x: jax_bnar.bn_relu(x, None, None, implementation="ffi").y).trace(x).lower(
        lowering_platforms=("cuda",)
    )
except NotImplementedError as error:
    assert "has kernels for cpu only" in str(error), error
    assert "jax-bnar-cuda13 is not installed" in str(error), error
else:
    raise AssertionError("lowered")
"""
    environment = driver(stand_in_driver, "13.0", "9.0")
    finished = run(
        tmp_path, block + LOWER + code + here, "-W", "error", environment=environment
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def test_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    """The operands of custom calls may differ between versions."""
    install(tmp_path, "0.0.9", STAND_IN)
    finished = run(tmp_path, "import jax_bnar")
    assert finished.returncode == 1
    last = finished.stderr.splitlines()[-1]
    ours = jax_bnar.__version__
    assert last.startswith(f"ImportError: jax_bnar {ours} works only with jax-bnar-cuda13 {ours}")
    assert "found version 0.0.9" in last
    assert "pip uninstall jax-bnar-cuda13" in last

    finished = run(tmp_path, "", "-m", "jax_bnar.doctor")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "does NOT work" in finished.stdout
    assert "found version 0.0.9" in finished.stdout
    assert "executed    float32" in finished.stdout  # the CPU kernels were examined all the same


def test_a_module_that_does_not_load_is_worth_a_warning(
    tmp_path: pathlib.Path, stand_in_driver: pathlib.Path
) -> None:
    install(tmp_path, jax_bnar.__version__, "raise ImportError('GLIBC_2.99 not found')")
    code = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert "custom_call @jax_bnar_forward_v1" in lowered("cpu")
    assert "custom_call @jax_bnar" not in lowered("cuda")
(warning,) = caught
assert "without its CUDA kernels" in str(warning.message), warning
assert "GLIBC_2.99 not found" in str(warning.message), warning
"""
    environment = driver(stand_in_driver, "13.0", "9.0")
    finished = run(tmp_path, LOWER + code, environment=environment)
    assert finished.returncode == 0, finished.stderr
    finished = run(tmp_path, "", "-m", "jax_bnar.doctor")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "GLIBC_2.99 not found" in finished.stdout


def test_a_build_from_the_sources_comes_first(tmp_path: pathlib.Path) -> None:
    """Its modules belong together; the other distribution may be of any version."""
    if targets.cuda is None:
        pytest.skip("this build has no CUDA kernels")
    if targets.cuda.__name__ != "jax_bnar._cuda":
        pytest.skip("they come from the other distribution")
    install(tmp_path, "0.0.9", "raise SystemExit('imported')")
    code = "assert targets.cuda.__name__ == 'jax_bnar._cuda'"
    finished = run(tmp_path, LOWER + code, "-W", "error", own_cuda=True)
    assert finished.returncode == 0, finished.stderr
