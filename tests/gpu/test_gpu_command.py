"""Tests `make gpu` without a GPU: the runner, the plan, and a dry run on the CPU."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import calls_outside_graphs

from benchmarks.common.sites import RESNET50_SITES, one_read_bytes
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import plan, work
from benchmarks.gpu import steps as steps_module
from benchmarks.gpu.steps import Command, Step, StepRecord, run_steps


def step(name: str, code: str, *, limit_s: float = 30, **more: Any) -> Step:
    return Step(name, (Command((sys.executable, "-c", code)),), limit_s, **more)


def run(steps: list[Step], directory: Path, budget_s: float = 100) -> dict[str, StepRecord]:
    records: list[StepRecord] = []
    returned = run_steps(
        steps,
        directory=directory,
        working_directory=directory,
        budget_s=budget_s,
        while_running=lambda record: None,
        after_each=records.append,
    )
    assert returned == records
    return {record.name: record for record in records}


@pytest.mark.slow
def test_goes_on_after_failures(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    output.write_text('"of an earlier run"')
    writes = f"import sys; open({str(output)!r}, 'w').write('{{\"a\": 1}}'); print('said')"
    found = run(
        [
            step("fails", "print('why'); raise SystemExit(3)"),
            step("needs", "", needs=("fails",)),
            step("needs_absent", "", needs=("another",)),
            Step("absent", (Command((str(tmp_path / "no_such_program"),)),), 10),
            Step("skips", (), 10, skip="no such tool"),
            step("hangs", "import time; print('so far', flush=True); time.sleep(60)", limit_s=5.5),
            Step(
                "two",
                (
                    Command((sys.executable, "-c", writes), {}, output, "--seconds"),
                    Command((sys.executable, "-c", "import os; os.abort()")),
                ),
                20,
            ),
        ],
        tmp_path,
    )
    assert {name: record.status for name, record in found.items()} == {
        "fails": "failed",
        "needs": "not_run",
        "needs_absent": "passed",
        "absent": "failed",
        "skips": "skipped",
        "hangs": "timed_out",
        "two": "failed",
    }
    assert found["fails"].commands[0].tail == "why\n"
    assert found["fails"].reason == "exit status 3"
    assert found["needs"].reason == "without fails there is nothing to run"
    assert found["hangs"].commands[0].tail == "so far\n"
    assert 5 < found["hangs"].seconds < 12
    good, bad = found["two"].commands
    assert good.result == {"a": 1}
    assert good.argv[-2:] == ("--seconds", "16.0")
    assert (good.exit_status, bad.exit_status) == (0, -6)


def test_budget_ends_the_run(tmp_path: Path) -> None:
    found = run([step("a", "raise SystemExit(1)"), step("b", "")], tmp_path, budget_s=4)
    assert {record.status for record in found.values()} == {"not_run"}


@pytest.mark.slow
def test_what_a_running_step_has_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill then loses seconds, not the step."""
    monkeypatch.setattr(steps_module, "REPORT_SECONDS", 0.2)
    output = tmp_path / "result.json"
    code = (
        "import time; time.sleep(1); print('measured a', flush=True);"
        f" open({str(output)!r}, 'w').write('[1]'); time.sleep(2)"
    )
    seen: list[StepRecord] = []
    run_steps(
        [Step("slow", (Command((sys.executable, "-c", code), {}, output),), 30)],
        directory=tmp_path,
        working_directory=tmp_path,
        budget_s=30,
        while_running=seen.append,
        after_each=lambda record: None,
    )
    assert {record.status for record in seen} == {"running"}
    assert seen[0].commands[0].result is None
    (last,) = seen[-1].commands
    assert (last.exit_status, last.result, last.tail) == (None, [1], "measured a\n")


def test_an_exception_ends_the_programs(tmp_path: Path) -> None:
    process = tmp_path / "process"
    code = f"import os, time; open({str(process)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt(record: StepRecord) -> None:
        while not (process.exists() and process.read_text()):
            time.sleep(0.02)
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        run_steps(
            [step("slow", code)],
            directory=tmp_path,
            working_directory=tmp_path,
            budget_s=30,
            while_running=interrupt,
            after_each=lambda record: None,
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)


def test_a_terminated_run_keeps_what_was_measured(tmp_path: Path) -> None:
    """The command as a whole, ended while a benchmark runs."""
    code = f"""
import json, signal, sys, threading, time
sys.path[:0] = [{str(plan.ROOT)!r}]
from pathlib import Path
from benchmarks.gpu import __main__ as command, plan, steps
from benchmarks.gpu.steps import Command, Step
steps.REPORT_SECONDS = 0.1
output = Path({str(tmp_path / "rows.json")!r})
row = dict(site="a", count=1, batch=2, dtype="float32", peer="ours", median_ms=1.5,
           one_read_bytes=1, two_read_bytes=1)
document = dict(family="jax", rows=[row])
writes = f"open({{str(output)!r}}, 'w').write({{json.dumps(document)!r}}); "
says, waits = "print('so far', flush=True); ", "import time; time.sleep(60)"
program = (sys.executable, "-c", says + writes + waits)
summary = Path({str(tmp_path / "out" / "summary.json")!r})
plan.Plan.steps = lambda self, names: [Step("smoke", (Command(program, {{}}, output),), 60)]
def terminate():
    while not (summary.exists() and "sum_ms" in summary.read_text()):
        time.sleep(0.05)
    signal.raise_signal(signal.SIGTERM)
threading.Thread(target=terminate).start()
command.main(["--only", "smoke", "--work", {str(tmp_path / "work")!r},
              "--output", {str(tmp_path / "out")!r}])
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert finished.returncode == 128 + signal.SIGTERM, finished.stderr.decode()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert not summary["complete"]
    (record,) = summary["steps"]
    assert record["status"] == "running"
    assert summary["table"][0]["peers"]["ours"]["sum_ms"] == 1.5
    assert "so far" in (tmp_path / "out" / "log.txt").read_text()


def test_failures_are_printed_at_once(tmp_path: Path) -> None:
    """A hang that ends the run must not take the text of an earlier failure with it."""
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_first(): assert 1 == 2, 'the reason'\ndef test_second(): os._exit(3)\n"
    )
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.failures_now"]
    finished = subprocess.run(
        [sys.executable, *argv, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=dict(os.environ) | {"PYTHONPATH": str(plan.ROOT)},
    )  # fmt: skip
    assert finished.returncode == 3
    assert "=== FAILED test_it.py::test_first (call)" in finished.stdout
    assert "AssertionError: the reason" in finished.stdout


def test_a_result_that_an_earlier_run_left_does_not_count(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    output.write_text("{}")
    found = run([Step("a", (Command(("false",), {}, output),), 10)], tmp_path)
    assert found["a"].commands[0].result is None


def test_plan_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setattr(plan, "find_cuda_tool", lambda name: f"/cuda/bin/{name}")
    steps = {s.name: s for s in plan.Plan("cuda", tmp_path, workers=8).steps(plan.NAMES)}
    assert tuple(steps) == plan.NAMES
    (build,) = steps["build"].commands
    assert {"--no-build-isolation", "--no-deps", "--no-index"} <= set(build.argv)
    assert "--config-settings=cmake.define.JAX_BNAR_CUDA=ON" in build.argv
    assert "--config-settings=cmake.define.JAX_BNAR_WARNINGS_AS_ERRORS=ON" in build.argv
    assert "--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=native" in build.argv
    # What the first minutes must give comes first, and each step fits a call of ten minutes.
    assert plan.DEFAULT[:5] == ("build", "smoke", "micro", "doctor", "sites_jax")
    assert plan.DEFAULT[5:7] == ("sites_torch", "tests")
    assert all(step.limit_s <= plan.LONGEST_STEP_S for step in steps.values())
    assert sum(steps[name].limit_s for name in plan.DEFAULT[:3]) <= 400
    assert steps["micro"].needs == ()
    (smoke,) = steps["smoke"].commands
    assert steps["smoke"].limit_s <= 60
    assert smoke.environment["XLA_FLAGS"].startswith("--xla_a=1 --xla_gpu_enable_command_buffer=FU")
    parts = {name: steps[name].commands[0].argv for name in ("sites_jax", "benchmark_jax")}
    assert {name: argv[argv.index("--part") + 1] for name, argv in parts.items()} == {
        "sites_jax": "first",
        "benchmark_jax": "rest",
    }
    (tests,) = steps["tests"].commands
    assert "benchmarks.gpu.failures_now" in tests.argv
    assert tests.environment["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_enable_command_buffer="
    assert tests.environment["JAX_PLATFORMS"] == "cuda,cpu"
    assert tests.environment["PYTHONPATH"].startswith(str(tmp_path / "site"))
    tools = [c.argv[c.argv.index("--tool") + 1] for c in steps["sanitize"].commands]
    assert tools == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert {c.environment["XLA_PYTHON_CLIENT_ALLOCATOR"] for c in steps["sanitize"].commands} == {
        "platform"
    }
    (counters,) = steps["counters"].commands
    assert counters.environment["XLA_FLAGS"] == tests.environment["XLA_FLAGS"]
    monkeypatch.setattr(plan, "find_cuda_tool", lambda name: None)
    monkeypatch.setattr(plan, "find_ncu", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    names = ("sanitize", "benchmark_torch", "resnet50_torch", "counters")
    without = plan.Plan("cuda", tmp_path, workers=8).steps(names)
    assert {step.name: step.skip for step in without} == {
        "sanitize": "compute-sanitizer is not installed",
        "benchmark_torch": "torch is not installed",
        "resnet50_torch": "torch is not installed",
        "counters": "ncu is not installed",
    }


def test_a_wheel_is_installed_instead_of_a_build(tmp_path: Path) -> None:
    wheels = (tmp_path / "jax_bnar.whl", tmp_path / "jax_bnar_cuda13.whl")
    (build,) = plan.Plan("cuda", tmp_path, workers=1, wheels=wheels).steps(("build",))
    argv = build.commands[0].argv
    assert argv[-2:] == tuple(map(str, wheels))
    assert str(plan.ROOT) not in argv
    assert {"--no-deps", "--no-index", "--target"} <= set(argv)
    assert command.parse(["--wheel", "a.whl", "b.whl"]).wheel == [Path("a.whl"), Path("b.whl")]


def test_arguments() -> None:
    defaults = command.parse([])
    assert tuple(defaults.only) == plan.DEFAULT
    assert defaults.platform == "cuda"
    assert defaults.budget == float("inf")
    given = command.parse(["--only", "tests", "doctor", "--", "--batch", "32"])
    assert given.only == ["tests", "doctor"]
    assert given.benchmark == ["--batch", "32"]
    with pytest.raises(SystemExit):
        command.parse(["--only", "everything"])


def test_work_of_the_benchmark(tmp_path: Path) -> None:
    given = ["--output", str(tmp_path / "a.json"), "--batch", "256", "32"]
    wanted = work.parse(None, given, ("copy", "ours"), ("ours_cluster",))
    assert [(w.batch, w.dtype, w.peers) for w in wanted.waves[:3]] == [
        (256, "bfloat16", ("copy", "ours")),
        (256, "bfloat16", ("ours_cluster",)),
        (256, "float16", ("copy", "ours")),
    ]
    assert {(w.batch, w.dtype) for w in wanted.waves} == {
        (batch, dtype) for batch in (256, 32) for dtype in ("float32", "float16", "bfloat16")
    }
    assert set(wanted.sites) == set(RESNET50_SITES)
    for wave in wanted.waves:
        for site in wanted.sites:
            size = 2 if wave.dtype != "float32" else 4
            held = 6 * wanted.sets(site, wave) * site.elements(wave.batch) * size
            assert held >= 256 << 20
    assert work.parse(None, [*given, "--seconds", "-1"], ("ours",), ()).time_is_up()
    # What decides between slabs comes directly after the main peers, and is not measured again.
    first, decisive, more = work.parse(
        None, [*given, "--part", "first"], ("ours",), ("a", "slab"), ("slab",)
    ).waves
    assert (first.peers, decisive.peers, more.peers) == (("ours",), ("slab",), ("a", "slab"))
    assert wanted.sites_of(first) == wanted.sites
    labels = {site.label for site in wanted.sites_of(decisive)}
    assert {label.split()[0] for label in labels} == {"56x56x256", "28x28x128", "14x14x256"}
    results = work.Results(wanted, "jax", {})
    (site, *_) = wanted.sites_of(decisive)
    results.add(site, decisive, "slab", [1.0])
    assert results.left(site, more) == ("a",)
    assert results.left(site, first) == ("ours",)
    parts = {
        part: work.parse(None, [*given, "--part", part], ("copy", "ours"), ("ours_cluster",)).waves
        for part in ("first", "rest")
    }
    assert parts["first"] + parts["rest"] == wanted.waves
    assert {(w.batch, w.dtype) for w in parts["first"]} == {(256, "bfloat16")}


def test_a_row_is_written_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    wanted = work.parse(None, ["--output", str(output)], ("ours",), ())
    results = work.Results(wanted, "jax", {})
    site, wave = RESNET50_SITES[0], wanted.waves[0]
    results.add(site, wave, "ours", [1.0, 3.0, 2.0])
    assert [row["median_ms"] for row in json.loads(output.read_text())["rows"]] == [2.0]
    results.fail(site, wave, "flax", ValueError("too bad"))
    assert json.loads(output.read_text())["errors"][0]["error"] == "ValueError: too bad"


def test_minimal_bytes_of_the_step() -> None:
    step = sum(site.count * one_read_bytes(site, 256, 2) for site in RESNET50_SITES)
    assert step == pytest.approx(34.46e9, rel=1e-3)


def test_calls_beside_a_command_buffer_are_found() -> None:
    inside = (
        "000: kKernel\t loop_fusion\n001: kCommandBuffer\t ops\n"
        "  000: kCustomCall\t jax_bnar_forward\n  001: kKernel\t a\n"
    )
    beside = "002: kCustomCall\t jax_bnar_backward"
    assert calls_outside_graphs(inside) == []
    assert calls_outside_graphs(inside + beside + "\n") == [beside]
    assert calls_outside_graphs(beside) == [beside]


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs the steps on the CPU, with the package that is being tested."""
    code = command.main(
        [
            "--platform", "cpu", "--workers", "0",
            "--skip", "build", "doctor", "sites_torch", "benchmark_torch", "resnet50_torch",
            "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"),
        ]
    )  # fmt: skip
    printed = capfd.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    statuses = {record["name"]: record["status"] for record in summary["steps"]}
    # Its dry run asks whether there is a compiler.
    assert statuses.pop("micro") in ("passed", "skipped")
    assert statuses == {
        "smoke": "passed",
        "sites_jax": "passed",
        "tests": "passed",
        "device": "passed",
        "programs": "passed",
        "sanitize": "passed",
        "large": "skipped",
        "benchmark_jax": "passed",
        "inference_joins": "passed",
        "resnet50_jax": "passed",
        "counters": "passed",
    }, (tmp_path / "out" / "log.txt").read_text()[-6000:]
    assert code == 0
    assert summary["dry_run"]
    assert summary["passed"]
    results = {record["name"]: record["commands"] for record in summary["steps"]}
    assert results["device"][0]["result"]["platform"] == "cpu"
    smoke = results["smoke"][0]["result"]
    assert smoke["complete"]
    assert smoke["running"] is None
    assert list(smoke["strategies"]) == ["two_kernels", "cluster", "on_chip", "auto"]
    assert all(entry["forward_ran"] for entry in smoke["strategies"].values())
    rest = results["benchmark_jax"][0]["result"]["rows"]
    assert {(row["peer"], row["dtype"]) for row in rest} == {
        (peer, "float32") for peer in ("copy", "ours", "ours_mask", "flax")
    }
    benchmark = results["sites_jax"][0]["result"]
    assert benchmark["dry_run"]
    assert not benchmark["errors"]
    assert {row["dtype"] for row in benchmark["rows"]} == {"bfloat16"}
    assert {row["peer"] for row in benchmark["rows"]} == {
        "copy", "ours", "ours_mask", "flax", "ours_on_chip", "ours_cluster",
        "ours_two_kernels", "ours_slab_32", "ours_slab_64", "ours_slab_128", "ours_slab_256",
    }  # fmt: skip
    assert {row["copies"] for row in benchmark["rows"]} == {0}
    # Forced strategies, too, in whose waves Flax is not timed.
    assert all("errors" in row for row in benchmark["rows"] if row["peer"] != "copy")
    assert "batch 2, bfloat16: 1 of 16 sites" in printed
    assert "python -m benchmarks.gpu.model --measured" in printed
    assert "inference joins, batch 2" in printed
    (join,) = results["inference_joins"][0]["result"]["joins"]
    assert join["ours"]["passes"] == join["xla"]["passes"] == 1
    networks = results["resnet50_jax"][0]["result"]["networks"]
    assert set(networks) == {"fused", "fused, save=mask", "flax, fuse", "flax"}
    assert all(network["images_per_s"] > 0 for network in networks.values())
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "=== " in log
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "summary.json"]


@pytest.mark.parametrize(
    ("strategies", "running", "expected"),
    [
        ({"two_kernels": {}, "cluster": {}, "on_chip": {}, "auto": {}}, None, None),
        ({"two_kernels": {}, "cluster": {}, "on_chip": {}}, "on_chip, graph", "two_kernels"),
        ({"two_kernels": {}, "cluster": {"error": "trap"}}, "on_chip, alone", "two_kernels"),
        ({"two_kernels": {"error": "wrong"}, "cluster": {}}, "on_chip, alone", None),
        ({}, None, None),
    ],
)
def test_later_steps_use_a_strategy_that_works(
    strategies: dict[str, Any], running: str | None, expected: str | None
) -> None:
    result = {"strategies": strategies, "running": running, "complete": len(strategies) == 4}
    ran = steps_module.CommandRecord((), {}, None, 60.0, "", "", result)
    smoke = StepRecord("smoke", "failed", None, 60.0, 60.0, (ran,))
    assert command.strategy_of_the_rest(smoke) == expected
