"""What the doctor concludes from what it has found: problems, and the ways out."""

import dataclasses
import errno
import io
import os
import pathlib
import re
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest

from jax_bnar._base import startup
from jax_bnar._base.native_module import native
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
    runtime_ffi_api_version=native.ffi_api_version(),
    cases=(Case("float32", "NHWC", agrees=True, largest_error=0.5, worst_result="y"),),
    jax_environment="jax: 1.2.3",
)


def report(**examined: Examined) -> Report:
    """The report on `default` and on other platforms, named by the value of JAX_PLATFORMS."""
    return _diagnosis.report(lambda jax_platforms: examined[jax_platforms or "default"])


def problem_text(found: Report, platform: str) -> str:
    return "\n".join(f"{p.reason} -> {p.way_out}" for p in found.platforms[platform].problems)


def raises(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_PLATFORMS", "JAX_BNAR_IMPLEMENTATION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((each, f"finite and above 0, got {each}") for each in ("0", "-1", "nan", "inf")),
        ("x", "a number of seconds, got 'x'"),
    ],
)
def test_timeouts_that_are_none(
    seconds: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main([f"--timeout={seconds}"])
    assert f"argument --timeout: must be {words}" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "report", lambda examine: report(default=Examined(ALL_WELL, None)))
    full = io.StringIO()
    monkeypatch.setattr(full, "flush", raises(OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(sys, "stdout", full)
    assert command.main([]) == 1
    assert capsys.readouterr().err == (
        "python -m jax_bnar.doctor: standard output cannot be written (No space left on device).\n"
    )
    monkeypatch.setattr(sys, "stdout", None)  # It was closed.
    assert command.main([]) == 0


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "get fresh pages: .* three lines"),
        ({"MALLOC_TOP_PAD_": "1"}, "not those of XLA's threads .*MALLOC_ARENA_MAX is not 1"),
        ({"MALLOC_TOP_PAD_": "1", "MALLOC_ARENA_MAX": "16"}, "not those of XLA's threads"),
        ({"MALLOC_TOP_PAD_": "1", "MALLOC_ARENA_MAX": "1"}, "which keeps large blocks$"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=9:glibc.malloc.arena_max=16"},
            "not those of XLA's threads",
        ),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=9:glibc.malloc.arena_max=1"},
            "which keeps large blocks$",
        ),
    ],
    ids=["nothing", "large blocks", "16", "of all threads", "tunables of 16", "tunables"],
)
def test_what_glibc_keeps(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    allocator = _environment.versions_and_machine()[1].allocator
    if not allocator.startswith("glibc"):
        pytest.skip(f"the allocator is {allocator}")
    assert re.search(words, allocator)


def test_cuda_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "cuda", types.SimpleNamespace(__file__="/lib/_cuda.so"))
    build = CudaBuild((13, 0), ((8, 0), (9, 0)), ((9, 0),))
    monkeypatch.setattr(targets, "cuda_build", build)
    text = render(report(default=Examined(ALL_WELL, None)))
    assert re.search(
        r"CUDA kernels +CUDA 13\.0, sm_80, sm_90, PTX for 9\.0 and newer, /lib/_cuda\.so\n", text
    )


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
def test_a_setting_that_every_operator_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one way out, and it is not to report a bug."""
    refusal = ValueError("jax_bnar: JAX_BNAR_CPU_ISA must be 'avx2'; got 'mmx'.")
    monkeypatch.setattr(targets, "cpu_isa", raises(refusal))
    case = Case("float32", "NHWC", agrees=False, error=_examination.describe(refusal))
    examination = dataclasses.replace(ALL_WELL, cases=(case,))
    found = report(default=Examined(examination, None))
    assert not found.works
    assert [problem.way_out for problem in found.problems] == ["unset JAX_BNAR_CPU_ISA"]
    assert problem_text(found, "cpu").endswith("got 'mmx'. -> unset JAX_BNAR_CPU_ISA")


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "jax_bnar.doctor"], True),
        (["-mjax_bnar.doctor", "--json"], True),
        (["-Pm", "jax_bnar.doctor"], True),
        (["-W", "error", "-X", "importtime", "-m", "jax_bnar.doctor"], True),
        (["-m", "jax_bnar.profile"], False),
        (["-m"], False),
        (["-c", "import jax_bnar.doctor"], False),
        (["train.py", "jax_bnar.doctor"], False),
    ],
)
def test_whether_this_process_is_the_doctor(
    arguments: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *arguments])
    assert startup.is_doctor() is expected


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
