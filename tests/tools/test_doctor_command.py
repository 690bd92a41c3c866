"""`python -m jax_bnar.doctor` as a whole, in installations that work and in broken ones."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import pytest
from subprocesses import python_path

import jax_bnar
from jax_bnar._kernels import targets


def run_doctor(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run_in(None, "-m", "jax_bnar.doctor", *arguments, **environment)


def run_in(
    folder: pathlib.Path | None, /, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a folder, or in the current one."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith("JAX_") and k != "PYTHONWARNINGS"
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=inherited | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_healthy() -> None:
    finished = run_doctor("--json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(finished.stdout)
    assert found["works"]
    assert found["default_platform"] == "cpu"
    assert found["versions"]["jax"] == jax.__version__
    assert found["build"]["native_module"].endswith(".so")
    assert found["machine"]["cpu_isa"] == targets.cpu_isa()
    assert found["build"]["cuda_abi"] == targets.cuda_abi()
    assert found["machine"]["huge_pages"] == targets.huge_pages()
    assert found["machine"]["allocator"].startswith(("glibc", "jemalloc", "tcmalloc"))
    assert found["machine"]["environment_variables"]["JAX_PLATFORMS"] == "cpu"
    assert f"jaxlib: {found['versions']['jaxlib']}" in found["jax_environment"]
    assert "PREALLOCATE" not in found["jax_environment"]
    cpu = found["platforms"]["cpu"]
    assert (cpu["status"], cpu["problems"]) == ("works", [])
    assert {"forward", "backward"} <= set(cpu["kernels"])
    assert {(case["dtype"], case["layout"]) for case in cpu["cases"]} == {
        (dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("NHWC", "NCHW")
    }
    assert all(case["agrees"] and 0 <= case["largest_error"] <= 1 for case in cpu["cases"])
    # The headers in jaxlib have the version of its runtime.
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    numbers = re.findall(r"define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)
    assert cpu["runtime_ffi_api_version"] == [int(number) for number in numbers]
    assert found["build"]["ffi_api_version"] <= cpu["runtime_ffi_api_version"]
    assert found["platforms"]["cuda"]["status"] in ("excluded", "unavailable")
    assert found["platforms"]["cuda"]["problems"]


@pytest.mark.slow
def test_native_module_missing(tmp_path: pathlib.Path) -> None:
    # A sitecustomize also affects the processes that the doctor starts.
    blocked = "import sys\nsys.modules['jax_bnar._native'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    path = python_path(tmp_path)
    finished = run_doctor(PYTHONPATH=path)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "the default platform (cpu) does NOT work" in finished.stdout
    assert "cpu (default): has no kernels in this build" in finished.stdout
    assert "the native module of jax_bnar did not load (" in finished.stdout
    assert "pip install ." in finished.stdout
    assert "executed" not in finished.stdout
    assert finished.stderr == ""


@pytest.fixture
def installed(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the package, with its native module, that shadows the installed one."""
    package = tmp_path / "jax_bnar"
    shutil.copytree(
        pathlib.Path(jax_bnar.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__", "_native.*"),
    )
    assert targets.native is not None
    module = targets.native.__file__
    assert module is not None
    shutil.copy(module, package)
    # The finder of an editable install would come first and find the sources.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith('Scikit')]"
    )
    return package


@pytest.fixture
def sources(tmp_path: pathlib.Path, installed: pathlib.Path) -> pathlib.Path:
    """The package in a checkout, without the native module."""
    package = tmp_path / "checkout" / "jax_bnar"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("_native.*.so"))
    return package


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="another loader may raise instead")
def test_truncated_native_module(installed: pathlib.Path) -> None:
    (module,) = (path for path in installed.glob("_native.*") if path.suffix != ".pyi")
    with module.open("r+b") as file:
        file.truncate(module.stat().st_size // 4)
    path = python_path(installed.parent)
    # Keep the current directory off the path, because it may be the checkout.
    found_first = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    loaded = subprocess.run([sys.executable, "-c", "import jax_bnar"], env=os.environ | found_first)
    assert loaded.returncode == -signal.SIGBUS
    finished = run_doctor(**found_first)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "the default platform (cpu) does NOT work" in finished.stdout
    assert f"{module} is damaged, or was built for another machine" in finished.stdout
    assert "a process that loaded it was killed by SIGBUS" in finished.stdout
    assert "the native module of jax_bnar did not load (" in finished.stdout
    assert "pip install ." in finished.stdout
    assert finished.stderr == ""


@pytest.mark.slow
def test_sources_that_hide_the_installed_package(
    tmp_path: pathlib.Path, installed: pathlib.Path, sources: pathlib.Path
) -> None:
    """As in a checkout, after `pip install .`: what is imported has no native module."""
    metadata = tmp_path / "jax_bnar-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: jax-bnar\nVersion: 0.1.0\n")
    path = python_path(sources.parent, installed.parent)
    finished = run_doctor(PYTHONPATH=path, PYTHONSAFEPATH="1")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert (
        f"the sources in {sources}, which have no native module, were imported instead of the"
        f" installed package in {installed}"
    ) in finished.stdout
    assert "python -P" in finished.stdout
    assert "install the package" not in finished.stdout
    # Without the checkout's folder it works.
    finished = run_doctor(PYTHONPATH=python_path(installed.parent), PYTHONSAFEPATH="1")
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
def test_in_a_checkout_with_the_option_of_the_readme(
    installed: pathlib.Path, sources: pathlib.Path
) -> None:
    """The process that examines a platform must not import the sources here either."""
    path = python_path(installed.parent)
    finished = run_in(sources.parent, "-P", "-m", "jax_bnar.doctor", PYTHONPATH=path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "executed    float32" in finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_old_jax(tmp_path: pathlib.Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import jax\njax.__version__, jax.__version_info__ = '0.8.1', (0, 8, 1)\ndel jax.typeof\n"
    )
    path = python_path(tmp_path)
    finished = run_doctor(*arguments, PYTHONPATH=path)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert finished.stderr == ""
    reason = "jax 0.8.1 is older than 0.10.2, the oldest version jax_bnar supports"
    if arguments:
        found = json.loads(finished.stdout)
        assert not found["works"]
        assert [problem["reason"] for problem in found["problems"]] == [reason]
    else:
        assert finished.stdout == f"{reason}: pip install --upgrade 'jax>=0.10.2'\n"


@pytest.mark.slow
def test_plugin_that_does_not_start(tmp_path: pathlib.Path) -> None:
    """JAX only logs the reason; the exception that it raises does not tell."""
    plugin = tmp_path / "jax_plugins" / "xla_cuda13"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize(): raise OSError('no cuDNN here')")
    metadata = tmp_path / "jax_cuda13_plugin-9.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 9.8\n")
    path = python_path(tmp_path)
    finished = run_doctor("--json", PYTHONPATH=path, JAX_PLATFORMS="cuda")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    found = json.loads(finished.stdout)
    assert found["default_platform"] == "cuda"
    assert found["versions"]["cuda_packages"]["jax-cuda13-plugin"] == "9.8"
    cuda = found["platforms"]["cuda"]
    assert cuda["status"] == "unavailable"
    assert "OSError: no cuDNN here" in cuda["log"]
    reasons = [problem["reason"] for problem in cuda["problems"]]
    assert any(reason.startswith("JAX found no device: ") for reason in reasons)
    assert "JAX has no CUDA plugin" not in reasons
    # The report is complete all the same.
    assert found["platforms"]["cpu"]["status"] == "works"
    assert "jaxlib: " in found["jax_environment"]
