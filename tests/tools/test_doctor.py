"""`python -m jax_bnar.doctor` recognises broken installations and says what is wrong."""

import dataclasses
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import types
from typing import Any

import jax
import numpy as np
import oracle
import pytest

import jax_bnar
from jax_bnar._kernels import targets
from jax_bnar._kernels.cuda_images import CudaBuild
from jax_bnar.doctor import __main__ as command
from jax_bnar.doctor import _diagnosis, _environment, _examination, _processes
from jax_bnar.doctor._examination import Examined
from jax_bnar.doctor._report import Case, Examination, Problem, Report, render

ALL_WELL = Examination(
    step="end",
    platform="cpu",
    device_kind="cpu",
    device_count=1,
    runtime_ffi_api_version=(0, 3),
    cases=(Case("float32", "NHWC", agrees=True, largest_error=0.5, worst_result="y"),),
    jax_environment="jax: 1.2.3",
)


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


def report(**examined: Examined) -> Report:
    """The report on `default` and on other platforms, named by the value of JAX_PLATFORMS."""
    return _diagnosis.report(lambda jax_platforms: examined[jax_platforms or "default"])


def problem_text(found: Report, platform: str) -> str:
    return "\n".join(f"{p.reason} -> {p.way_out}" for p in found.platforms[platform].problems)


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_PLATFORMS", "JAX_BNAR_IMPLEMENTATION"):
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_timeouts_that_are_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([f"--timeout={seconds}"])
    assert "--timeout" in capsys.readouterr().err


def test_native_module_missing(tmp_path: pathlib.Path) -> None:
    # A sitecustomize also affects the processes that the doctor starts.
    blocked = "import sys\nsys.modules['jax_bnar._native'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
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


@pytest.mark.skipif(sys.platform != "linux", reason="another loader may raise instead")
def test_truncated_native_module(installed: pathlib.Path) -> None:
    (module,) = (path for path in installed.glob("_native.*") if path.suffix != ".pyi")
    with module.open("r+b") as file:
        file.truncate(module.stat().st_size // 4)
    path = os.pathsep.join([str(installed.parent), os.environ.get("PYTHONPATH", "")])
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


def test_sources_that_hide_the_installed_package(
    tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    """As in a checkout, after `pip install .`: what is imported has no native module."""
    sources = tmp_path / "checkout" / "jax_bnar"
    shutil.copytree(installed, sources, ignore=shutil.ignore_patterns("_native.*.so"))
    metadata = tmp_path / "jax_bnar-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: jax-bnar\nVersion: 0.1.0\n")
    path = [str(sources.parent), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    finished = run_doctor(PYTHONPATH=os.pathsep.join(path), PYTHONSAFEPATH="1")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert (
        f"the sources in {sources}, which have no native module, were imported instead of the"
        f" installed package in {installed}"
    ) in finished.stdout
    assert "python -P" in finished.stdout
    assert "install the package" not in finished.stdout
    # Without the checkout's folder it works.
    finished = run_doctor(PYTHONPATH=os.pathsep.join(path[1:]), PYTHONSAFEPATH="1")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_in_a_checkout_with_the_option_of_the_readme(
    tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    """The process that examines a platform must not import the sources here either."""
    sources = tmp_path / "checkout" / "jax_bnar"
    shutil.copytree(installed, sources, ignore=shutil.ignore_patterns("_native.*.so"))
    path = os.pathsep.join([str(installed.parent), os.environ.get("PYTHONPATH", "")])
    finished = run_in(sources.parent, "-P", "-m", "jax_bnar.doctor", PYTHONPATH=path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "executed    float32" in finished.stdout


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_old_jax(tmp_path: pathlib.Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import jax\njax.__version__, jax.__version_info__ = '0.8.1', (0, 8, 1)\ndel jax.typeof\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
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


@pytest.mark.usefixtures("no_variables")
def test_cuda_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "cuda", types.SimpleNamespace(__file__="/lib/_cuda.so"))
    build = CudaBuild((13, 0), ((8, 0), (9, 0)), ((9, 0),))
    monkeypatch.setattr(targets, "cuda_build", build)
    text = render(report(default=Examined(ALL_WELL, None)))
    assert re.search(
        r"CUDA kernels +CUDA 13\.0, sm_80, sm_90, PTX for 9\.0 and newer, /lib/_cuda\.so\n", text
    )


def test_plugin_that_does_not_start(tmp_path: pathlib.Path) -> None:
    """JAX only logs the reason; the exception that it raises does not tell."""
    plugin = tmp_path / "jax_plugins" / "xla_cuda13"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize(): raise OSError('no cuDNN here')")
    metadata = tmp_path / "jax_cuda13_plugin-9.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 9.8\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
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


@pytest.fixture(scope="module")
def executed() -> dict[str, list[np.ndarray]]:
    return {name: _examination.execute(name, "bfloat16", "NCHW") for name in ("ffi", "xla")}


@pytest.mark.parametrize("result", range(len(_examination._RESULTS)))
@pytest.mark.parametrize("wrong", ["one element", "nan", "everywhere"])
def test_wrong_numbers_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    executed: dict[str, list[np.ndarray]],
    result: int,
    wrong: str,
) -> None:
    kernels = [array.copy() for array in executed["ffi"]]
    values = kernels[result].astype(np.float64)
    if wrong == "one element":
        values.flat[np.argmax(values)] *= 1.03
    elif wrong == "nan":
        values.flat[-1] = np.nan
    else:
        values += 0.03
    kernels[result] = values.astype(kernels[result].dtype)
    results = {"ffi": kernels, "xla": executed["xla"]}
    monkeypatch.setattr(_examination, "execute", lambda implementation, *_: results[implementation])
    case = _examination.examine_case("bfloat16", "NCHW")
    assert not case.agrees
    assert case.worst_result == _examination._RESULTS[result]
    assert (case.largest_error is None) == (wrong == "nan")


@pytest.mark.usefixtures("no_variables")
def test_wrong_numbers_fail_the_platform() -> None:
    case = Case("bfloat16", "NHWC", agrees=False, largest_error=7.25, worst_result="dx")
    examination = dataclasses.replace(ALL_WELL, cases=(*ALL_WELL.cases, case))
    found = report(default=Examined(examination, None))
    assert not found.works
    assert found.platforms["cpu"].status == "wrong"
    assert "bfloat16 NHWC: dx differs from pure JAX by 7.25 times" in problem_text(found, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_gate_hangs_on_a_rounding(dtype: str) -> None:
    x, z, scale, bias, *_ = (np.asarray(a) for a in _examination.operands(dtype, "NHWC"))
    pre = oracle.forward(x, z, scale, bias, epsilon=_examination._EPSILON, relu=False)
    assert np.all(np.abs(pre.y) > 2 * pre.y_allowance)


def test_an_error_is_reported_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*_: Any) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(_examination, "execute", execute)
    case = _examination.examine_case("float32", "NHWC")
    assert not case.agrees
    assert case.error == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"


def test_an_error_without_a_message_says_where() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    described = _examination.describe(caught.value)
    assert re.fullmatch(r"AssertionError: raised in .*test_doctor.py:\d+", described)


@pytest.mark.usefixtures("no_variables")
def test_default_platform_without_kernels() -> None:
    tpu = dataclasses.replace(ALL_WELL, platform="tpu", device_kind="TPU v5", cases=())
    found = report(default=Examined(tpu, None), cpu=Examined(ALL_WELL, None))
    assert not found.works
    assert found.default_platform == "tpu"
    assert found.platforms["tpu"].status == "no_kernels"
    assert "this installation has kernels for cpu" in problem_text(found, "tpu")
    assert found.platforms["cpu"].status == "works"


@pytest.mark.usefixtures("no_variables")
def test_cuda_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    only_cpu = frozenset(pair for pair in targets.kernels if pair[1] == "cpu")
    monkeypatch.setattr(targets, "kernels", only_cpu)
    h200 = dataclasses.replace(ALL_WELL, platform="cuda", device_kind="NVIDIA H200", cases=())
    found = report(default=Examined(h200, None), cpu=Examined(ALL_WELL, None))
    assert not found.works
    text = problem_text(found, "cuda")
    assert "kernels for cpu only" in text
    assert "cmake.define.JAX_BNAR_CUDA=ON" in text


@pytest.mark.usefixtures("no_variables")
def test_gpu_that_cannot_load_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    both = frozenset((name, where) for name, _ in targets.kernels for where in ("cpu", "cuda"))
    monkeypatch.setattr(targets, "kernels", both)
    obstacle = Problem("Tesla T4 has compute capability 7.5", "leave it as it is")
    t4 = Examination("end", "cuda", "Tesla T4", 1, cuda_obstacle=obstacle)
    found = report(default=Examined(t4, None), cpu=Examined(ALL_WELL, None))
    assert not found.works
    assert found.platforms["cuda"].status == "unsupported"
    assert found.platforms["cuda"].problems == (obstacle,)
    text = render(found)
    assert "cuda (default): cannot load the kernels of this build\n" in text
    assert "reason      Tesla T4 has compute capability 7.5\n    way out   leave it as" in text
    assert found.platforms["cpu"].status == "works"


@pytest.mark.usefixtures("no_variables")
def test_gpu_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX falls back to the CPU, and the report gives the reason."""
    monkeypatch.setattr(_environment, "has_cuda_plugin", lambda versions: True)
    broken = Examination(step="start of the backend", error="RuntimeError: CUDA_ERROR_NO_DEVICE")
    found = report(default=Examined(ALL_WELL, None), cuda=Examined(broken, None))
    assert found.works
    assert found.platforms["cuda"].status == "unavailable"
    assert "JAX found no device: RuntimeError: CUDA_ERROR_NO_DEVICE" in problem_text(found, "cuda")

    monkeypatch.setenv("JAX_PLATFORMS", "gpu")
    found = report(default=Examined(broken, None), cpu=Examined(ALL_WELL, None))
    assert not found.works
    assert found.default_platform == "cuda"
    assert (found.jax_environment, found.jax_environment_platform) == ("jax: 1.2.3", "cpu")
    text = render(found)
    assert "the default platform (cuda) does NOT work" in text
    assert "CUDA_ERROR_NO_DEVICE" in text


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("step", "status", "works"),
    [
        ("import", "unavailable", False),
        ("start of the backend", "unavailable", False),
        ("operator in bfloat16, NHWC", "failed", False),
        ("jax.print_environment_info", "works", True),
    ],
)
def test_crash(step: str, status: str, works: bool) -> None:
    """A process may crash at any step; without JAX's text the verdict is still complete."""
    found_so_far = dataclasses.replace(ALL_WELL, step=step, jax_environment=None)
    if status == "unavailable":
        found_so_far = Examination(step=step)
    crashed = Examined(found_so_far, "killed by SIGSEGV")
    found = report(default=crashed, cpu=crashed)
    assert found.works == works
    assert found.platforms["cpu"].status == status
    assert (f"killed by SIGSEGV (step: {step})" in problem_text(found, "cpu")) == (not works)
    assert "jax.print_environment_info() returned nothing" in render(found)


def test_a_process_that_crashes_says_how_far_it_came() -> None:
    code = """
import os, signal
from jax_bnar.doctor import _examination
examine_case = _examination.examine_case
def crashes(dtype, layout):
    if dtype == "bfloat16":
        print("a plugin speaks", flush=True, end="")
        os.kill(os.getpid(), signal.SIGSEGV)
    return examine_case(dtype, layout)
_examination.examine_case = crashes
print("a plugin speaks", end="")
_examination.examine()
"""
    finished = _processes.run([sys.executable, "-c", code], timeout=120)
    assert finished.problem == "killed by SIGSEGV"
    found = _examination.read(finished.stdout)
    assert (found.step, found.platform) == ("operator in bfloat16, NHWC", "cpu")
    assert found.runtime_ffi_api_version is not None
    assert [case.agrees for case in found.cases] == [True, True]
    # Of a line that is cut off, nothing counts.
    assert _examination.read(finished.stdout + finished.stdout[:-2].rstrip("}")) == found


@pytest.mark.usefixtures("no_variables")
def test_runtime_older_than_the_build() -> None:
    case = Case("float32", "NHWC", agrees=False, error="XlaRuntimeError: No FFI handler registered")
    old = dataclasses.replace(ALL_WELL, runtime_ffi_api_version=(0, 1), cases=(case, case))
    found = report(default=Examined(old, None))
    text = problem_text(found, "cpu")
    assert found.platforms["cpu"].status == "failed"
    assert "but the runtime has 0.1 and refuses newer versions" in text
    assert text.count("No FFI handler registered") == 1


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize("value", ["xla", "cuda"])
def test_environment_that_turns_the_kernels_off(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("JAX_BNAR_IMPLEMENTATION", value)
    found = report(default=Examined(ALL_WELL, None))
    assert not found.works
    assert found.platforms["cpu"].status == "works"
    assert "JAX_BNAR_IMPLEMENTATION" in found.problems[0].reason


@pytest.mark.usefixtures("no_variables")
def test_jax_platforms_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment, "has_cuda_plugin", lambda versions: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = report(default=Examined(ALL_WELL, None))  # a KeyError if it asked for cuda
    assert found.platforms["cuda"].status == "excluded"
    assert "JAX_PLATFORMS=cpu excludes it" in problem_text(found, "cuda")


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path: pathlib.Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    begin = time.monotonic()
    # The child process keeps the output open too.
    hung = _processes.run(["sh", "-c", f"echo begun; sleep 60 3>{fifo} & sleep 60"], timeout=0.5)
    assert hung == ("timed out after 0.5 s", "begun\n", "")
    # The fifo is readable, at end of file, once no process can write to it.
    assert select.select([reader], [], [], 30)[0]
    assert os.read(reader, 1) == b""
    assert time.monotonic() - begin < 30
    os.close(reader)


def test_processes_that_crash() -> None:
    crash = _processes.run(["sh", "-c", f"kill -{signal.SIGSEGV:d} $$"], timeout=60)
    assert crash.problem == "killed by SIGSEGV"
    assert _processes.run(["sh", "-c", "exit 3"], timeout=60).problem == "exit status 3"
    missing = _processes.run(["a-program-that-is-not-there"], timeout=60)
    assert missing.problem is not None
    assert "No such file" in missing.problem


def test_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.65.06, NVIDIA H200, 143771 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert _environment._nvidia() == ("580.65.06", ("NVIDIA H200, 143771 MiB",))

    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    monkeypatch.setattr(_environment, "_DRIVER_FILE", file)
    assert _environment._nvidia() == ("580.65.06", ())
    # The open kernel module describes itself differently.
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release\n")
    assert _environment._nvidia() == ("575.57.08", ())
    file.unlink()
    assert _environment._nvidia() == (None, ())
