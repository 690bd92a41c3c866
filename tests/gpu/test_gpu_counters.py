"""Tests runs of the hardware counters without a GPU: of a fake ncu, and of the program alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ncu_output import FORWARD, launched, site, table

from benchmarks.common.sites import RESNET50_SITES, one_read_bytes
from benchmarks.gpu import counters, counters_program, ncu, plan
from benchmarks.gpu.work import Wave

SITES = {
    "device": "NVIDIA H200", "strategy": "auto", "save": "mask", "complete": True, "errors": [],
    "sites": [site("a", Forward__on_chip=1, Backward__on_chip=1), site("b", Forward__cluster=1)],
}  # fmt: skip
COUNTED = (
    launched("ForwardKernel", **FORWARD),
    launched("BackwardKernel"),
    launched("ForwardKernel"),
)
WRITES = 'cp "$folder/table" "$log"; cp "$folder/sites" "$output"'
STAND_IN = """\
#!/bin/sh
folder={folder}
case "$1" in
  --version) echo "NVIDIA (R) Nsight Compute"; echo "Version 2025.3.1.0 (build 1)"; exit ;;
  --query-metrics) cat "$folder/query"; exit ;;
esac
echo "$@" >>"$folder/asked"
while [ $# -gt 0 ]; do
  case "$1" in
    --log-file) log=$2 ;;
    --output) output=$2 ;;
    --metrics) metrics=$2 ;;
  esac
  shift
done
{behaviour}
"""


class StandIn:
    """A fake `ncu` on PATH, and the command that starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "table").write_text(table(*COUNTED))
        (folder / "sites").write_text(json.dumps(SITES))
        listed = [m.partition(".")[0] for m in ncu.METRICS if not m.startswith("launch__")]
        lines = "".join(f"{name}  Counter  %\n" for name in listed)
        (folder / "query").write_text(f"Device NVIDIA H200 (GH100)\n{lines}")

    def run(self, behaviour: str, *, seconds: float = 30) -> tuple[int, dict[str, Any]]:
        program = self.folder / "ncu"
        program.write_text(STAND_IN.format(folder=self.folder, behaviour=behaviour))
        program.chmod(0o755)
        output = self.folder / "counters.json"
        status = counters.main(["--output", str(output), "--seconds", str(seconds)])
        return status, json.loads(output.read_text())

    def asked(self) -> list[str]:
        """The options of each invocation."""
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return StandIn(tmp_path)


def test_a_run(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = stand_in.run(f"echo the program speaks; {WRITES}")
    assert (status, document["errors"], document["warnings"]) == (0, [], [])
    assert document["ncu"] == "Version 2025.3.1.0 (build 1)"
    assert document["device"] == "NVIDIA H200"
    assert document["complete"]
    assert not document["dry_run"]
    assert [row["site"] for row in document["rows"]] == ["a", "a", "b"]
    assert document["rows"][0]["dram_bytes_over_minimum"] == pytest.approx(2)
    assert (document["metrics_unknown"], document["metrics_without_value"]) == ([], [])
    printed = capsys.readouterr().out
    assert "the program speaks" in printed
    assert "\n".join(document["summary"]) in printed
    (asked,) = stand_in.asked()
    assert "--profile-from-start off --clock-control none" in asked
    assert "--kernel-name-base mangled --kernel-name regex:jax_bnar" in asked
    assert f"--metrics {','.join(ncu.METRICS)} {sys.executable} -m" in asked


def test_a_metric_that_the_device_lacks_is_not_asked_for(stand_in: StandIn) -> None:
    absent = ncu.STALLS["gmma"]
    query = stand_in.folder / "query"
    query.write_text(query.read_text().replace(absent.partition(".")[0], "another"))
    status, document = stand_in.run(WRITES)
    assert (status, document["metrics_unknown"]) == (0, [absent])
    assert absent not in stand_in.asked()[0]
    assert len(document["rows"]) == 3


def test_without_a_list_all_metrics_are_asked_for(stand_in: StandIn) -> None:
    (stand_in.folder / "query").write_text("==ERROR== Driver could not be loaded.\n")
    status, document = stand_in.run(WRITES)
    assert (status, document["metrics_unknown"]) == (0, [])
    (warning,) = document["warnings"]
    assert "Driver could not be loaded" in warning
    assert ",".join(ncu.METRICS) in stand_in.asked()[0]


def test_a_metric_that_ncu_refuses_is_left_out(stand_in: StandIn) -> None:
    refused = "launch__shared_mem_per_block"
    kept = tuple(metric for metric in ncu.METRICS if metric != refused)
    (stand_in.folder / "table").write_text(table(*COUNTED, metrics=kept))
    status, document = stand_in.run(
        f'case "$metrics" in *{refused}*)'
        f" echo '==ERROR== Failed to find metric regex:^{refused}\\.(sum|avg)$' >\"$log\"; exit 1"
        f" ;; esac; {WRITES}"
    )
    assert (status, document["errors"], document["metrics_unknown"]) == (0, [], [refused])
    assert [refused in asked for asked in stand_in.asked()] == [True, False]
    assert document["rows"][0]["shared_bytes_per_block"] is None
    assert document["rows"][0]["dram_bytes"] == 1e9


def test_an_ncu_that_may_not_count(stand_in: StandIn) -> None:
    words = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access"
    status, document = stand_in.run(
        f'cp "$folder/sites" "$output"; echo "{words}" >"$log"; echo "a traceback" >&2; exit 9'
    )
    assert status == 1
    assert words in document["errors"]
    assert any(e.startswith("exit 9") and "a traceback" in e for e in document["errors"])
    assert "a: ncu has no counters of ForwardKernel, but nothing follows" in document["errors"]
    # The launches are known all the same.
    assert [(row["site"], row["kernel"]) for row in document["rows"]] == [
        ("a", "ForwardKernel"), ("a", "BackwardKernel"), ("b", "ForwardKernel"),
    ]  # fmt: skip


def test_a_metric_that_no_kernel_has(stand_in: StandIn) -> None:
    metric = ncu.COUNTERS["l2_hit_percent"]
    empty = [(signature, {**values, metric: "n/a"}) for signature, values in COUNTED]
    (stand_in.folder / "table").write_text(table(*empty))
    status, document = stand_in.run(WRITES)
    assert (status, document["metrics_without_value"]) == (0, [metric])


def ends(process: str, seconds: float = 10) -> bool:
    """Whether a process that was sent a signal exits, which may take a while on a busy machine."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = subprocess.run(["ps", "-o", "stat=", "-p", process], capture_output=True, text=True)
        if state.stdout.strip() == "" or state.stdout.strip().startswith("Z"):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "when_asked", ["", f"{WRITES}; exit 1"], ids=["hears nothing", "writes what it has"]
)
def test_an_ncu_that_does_not_end(stand_in: StandIn, when_asked: str) -> None:
    begin = time.monotonic()
    status, document = stand_in.run(
        f"trap '{when_asked}' TERM; sleep 60 & echo $! >\"$folder/process\";"
        " while true; do wait $!; done",
        seconds=2,
    )
    assert time.monotonic() - begin < 4
    assert ends((stand_in.folder / "process").read_text().strip())
    assert status == 1
    assert any(error.startswith("no end in time") for error in document["errors"])
    assert len(document["rows"]) == (3 if when_asked else 0)


def test_without_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    assert counters.main(["--output", str(tmp_path / "a.json")]) == 1
    (error,) = json.loads((tmp_path / "a.json").read_text())["errors"]
    assert "install Nsight Compute" in error


def test_ncu_of_the_toolkit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert ncu.find_ncu() == str(program)


@pytest.mark.slow
def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in plan.Plan("cpu", tmp_path, workers=0).environment().items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "counters.json"
    status = counters.main(["--platform", "cpu", "--output", str(output), "--save", "y"])
    document = json.loads(output.read_text())
    assert (status, document["errors"]) == (0, [])
    assert document["dry_run"]
    assert document["complete"]
    assert document["save"] == "y"
    assert [(row["pass"], row["kernel"]) for row in document["rows"]] == [
        ("forward", None), ("backward", None),
    ]  # fmt: skip
    assert sum(row["minimum_bytes"] for row in document["rows"]) > 0


def test_sites_of_the_program(tmp_path: Path) -> None:
    heaviest = counters_program.parse(["--output", str(tmp_path)]).sites
    weights = [of.count * one_read_bytes(of, 1, 2) for of in heaviest]
    others = [of for of in RESNET50_SITES if of not in heaviest]
    assert {"28x28x128 bn_relu", "14x14x256 bn_relu"} <= {of.label for of in heaviest}
    assert weights == sorted(weights, reverse=True)
    # Five are the heaviest, and two more occur often.
    assert len(heaviest) == 7
    assert weights[4] >= max(of.count * one_read_bytes(of, 1, 2) for of in others)
    given = ["--output", str(tmp_path), "--sites", "7x7", "112"]
    assert {of.height for of in counters_program.parse(given).sites} == {7, 112}
    with pytest.raises(SystemExit):
        counters_program.parse(["--output", str(tmp_path), "--sites", "3x3"])


def test_launches_of_the_profiled_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runtime: Any = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start") or 0,
        cudaProfilerStop=lambda: calls.append("stop") or 0,
    )

    def counted() -> dict[str, int]:
        calls.append("count")
        return {"Forward on_chip": len(calls), "Statistics two_kernels": 5}

    monkeypatch.setattr(counters_program.targets, "cuda_launches", counted)
    of = next(of for of in RESNET50_SITES if of.label == "7x7x512 bn_relu")
    wave = Wave(1, "float32", ("ours",))
    entry = counters_program.describe(of, wave)
    counters_program.run_site(of, wave, "mask", runtime, entry)
    assert calls == ["count", "start", "stop", "count"]
    assert entry["launches"] == {"Forward on_chip": 3}
    assert sum(entry["minimum_bytes"].values()) == entry["one_read_bytes"]


def test_a_profiler_that_does_not_start() -> None:
    runtime: Any = SimpleNamespace(cudaProfilerStart=lambda: 35)
    with (
        pytest.raises(RuntimeError, match="cudaError_t 35"),
        counters_program.profiled(runtime),
    ):
        pytest.fail("continued without a profiler")
