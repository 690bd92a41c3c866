"""The times of single plans without a GPU: what is asked for and kept, and that it compiles."""

import json
import subprocess
from pathlib import Path

import pytest

for _package in ("flax", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.common.kernels import planner  # noqa: E402
from benchmarks.gpu.micro.build import find_nvcc  # noqa: E402
from benchmarks.gpu.model.devices import DEVICES  # noqa: E402
from benchmarks.gpu.timed_plans import __main__ as command  # noqa: E402
from benchmarks.gpu.timed_plans.cases import SITES, asked_plans, name_of  # noqa: E402

pytestmark = pytest.mark.one_python

ROW = {
    "asked": "auto:0:0", "direction": "forward", "strategy": "on_chip", "slab_channels": 64,
    "team": 33, "teams": 8, "tiles_kept": 24, "tiles": 24, "us": 12.5,
}  # fmt: skip


def program(folder: Path, script: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_planner_takes_what_it_is_asked_for() -> None:
    assert len(SITES) == 12
    assert len({name_of(site) for site in SITES}) == 12
    model = planner().cuda_cost_model()
    for asked in asked_plans():
        strategy, columns, teams = asked.split(":")
        plan = planner().cuda_plan(
            (1, 256 * 14 * 14, 1024, 1), "bfloat16",
            planner().cuda_forward_traffic("bfloat16", True, True),
            DEVICES["h200"].attributes(), model, [model], strategy, int(columns), int(teams),
        )  # fmt: skip
        assert strategy in ("auto", plan["strategy"])
        assert columns == "0" or plan["slab_channels"] == int(columns)


def test_a_plan_that_was_asked_for_twice_is_kept_once(tmp_path: Path) -> None:
    again = ROW | {"asked": "on_chip:64:8", "us": 12.6}
    other = ROW | {"direction": "backward"}
    lines = "\n".join(f"echo '{json.dumps(row)}'" for row in (ROW, other, again))
    argv = tmp_path / "argv"
    fake = program(tmp_path, f'echo "$@" > {argv}\n{lines}')
    rows = command.time_site(fake, "bfloat16", 32, SITES[-1], 10)
    assert [(row["direction"], row["us"]) for row in rows] == [
        ("forward", 12.5), ("backward", 12.5),
    ]  # fmt: skip
    assert {(row["site"], row["batch"]) for row in rows} == {(name_of(SITES[-1]), 32)}
    site = SITES[-1]
    residual = int(site.form == "bn_add_relu")
    size = f"{site.height} {site.width} {site.channels} {residual}"
    assert argv.read_text().split() == f"bfloat16 32 {size}".split() + list(asked_plans())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no memory >&2; exit 3", "batch 32: exit status 3: no memory"),
        ("exec sleep 30", "batch 32: no end within 1 s"),
    ],
)
def test_a_failing_program_is_told(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        command.time_site(program(tmp_path, script), "bfloat16", 32, SITES[0], 1)


def test_errors_are_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "plans.json"
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "find_nvcc", lambda: "nvcc")
    assert command.main(["--output", str(output)]) == 1
    (error,) = json.loads(output.read_text())["errors"]
    assert "no CUDA kernels are built in this checkout: run `make gpu" in error
    assert command.main(["--output", str(output), "--platform", "cpu"]) == 0
    assert json.loads(output.read_text())["complete"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_compiles_and_refuses_bad_arguments(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    try:
        library = command.built_kernels()
    except RuntimeError:
        library = None
    built = tmp_path / "timed_plans"
    command.compile_timed_plans(nvcc, built, "sm_90", library)
    if library is None:
        return  # That it compiles is seen in any checkout; only the kernels make a program of it.
    for argv in (["float64", *"12345", "auto:0:0"], ["bfloat16", *"12345", "onchip:0:0"], ["1"]):
        finished = subprocess.run([built, *argv], capture_output=True, text=True)
        assert finished.returncode == 2
        assert "expected DTYPE BATCH HEIGHT WIDTH CHANNELS RESIDUAL" in finished.stderr
