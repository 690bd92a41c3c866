"""Tests `make gpu` without a GPU: the runner, the plan, and a dry run on the CPU."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import calls_outside_graphs

from benchmarks.common.sites import RESNET50_SITES, one_read_bytes
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import plan, work
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
        load=lambda path: json.loads(path.read_text()),
        after_each=records.append,
    )
    assert returned == records
    return {record.name: record for record in records}


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
    (tests,) = steps["tests"].commands
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


def test_dry_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs the steps on the CPU, with the package that is being tested."""
    code = command.main(
        [
            "--platform", "cpu", "--workers", "0",
            "--skip", "build", "doctor", "benchmark_torch", "resnet50_torch",
            "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"),
        ]
    )  # fmt: skip
    printed = capfd.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    statuses = {record["name"]: record["status"] for record in summary["steps"]}
    assert statuses == {
        "device": "passed",
        "tests": "passed",
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
    benchmark = results["benchmark_jax"][0]["result"]
    assert benchmark["dry_run"]
    assert not benchmark["errors"]
    assert {row["peer"] for row in benchmark["rows"]} == {
        "copy", "ours", "ours_mask", "flax", "ours_on_chip", "ours_cluster",
        "ours_two_kernels", "ours_slab_16", "ours_slab_32", "ours_slab_64",
    }  # fmt: skip
    assert {row["copies"] for row in benchmark["rows"]} == {0}
    assert "batch 2, bfloat16: 1 of 16 sites" in printed
    assert "inference joins, batch 2" in printed
    (join,) = results["inference_joins"][0]["result"]["joins"]
    assert join["ours"]["passes"] == join["xla"]["passes"] == 1
    networks = results["resnet50_jax"][0]["result"]["networks"]
    assert set(networks) == {"fused", "fused, save=mask", "flax, fuse", "flax"}
    assert all(network["images_per_s"] > 0 for network in networks.values())
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "=== " in log
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "summary.json"]
