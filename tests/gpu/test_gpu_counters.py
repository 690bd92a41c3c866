"""Tests the hardware counters without a GPU: ncu's table, the sites, and runs of a fake ncu."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from benchmarks.common.sites import RESNET50_SITES, one_read_bytes
from benchmarks.gpu import counter_rows, counters, counters_program, ncu, ncu_csv, plan
from benchmarks.gpu.work import Wave

# A table as ncu 2024.2 writes it; the last line is truncated, and some numbers have separators.
TABLE = """\
==PROF== Connected to process 41645 (/usr/bin/python3.12)
==PROF== Profiling "ForwardKernel" - 0: 0%....50%....100% - 6 passes
==WARNING== Could not deploy stock section files, but, "well".

"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","device__attribute_display_name","dram__bytes_read.sum",\
"gpu__time_duration.sum","launch__shared_mem_per_block","lts__t_sector_hit_rate.pct"
"","","","","","","","","","","","","byte","ns","byte/block","%"
"0","41645","python3.12","127.0.0.1","void jax_bnar::cuda::ForwardKernel<__nv_bfloat16, (int)8, \
(int)2>(jax_bnar::cuda::ForwardParameters)","1","7","(256, 1, 1)","(264, 1, 1)","0","9.0",\
"NVIDIA H200","1,234,567","66432","115712","53.83"
"1","41645","python3.12","127.0.0.1","loop_add_fusion(float *, const float *)","1","7",\
"(128, 1, 1)","(8, 2, 1)","0","9.0","NVIDIA H200","512","1000","0","n/a"
==PROF== Disconnected from process 41645
"2","41645","python3.12","127.0.0.1","void jax_bnar::cuda::BackwardKernel<__nv_bfloat16, (int)8>(\
jax_bnar::cuda::BackwardParameters)","1","7","(256, 1, 1)","(264, 1, 1)","0","9.0","NVIDIA H200",\
"2,345,678","70000","115712","4"""

FORWARD = {
    "gpu__time_duration.sum": "200,000",
    "dram__bytes_read.sum": "600000000",
    "dram__bytes_write.sum": "400000000",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "1.50",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "12.25",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "3.10",
}


def launched(function: str, **values: str) -> tuple[str, dict[str, str]]:
    """One of our kernels as ncu names it, with values for some of the metrics."""
    return f"void jax_bnar::cuda::{function}<__nv_bfloat16, (int)8>(...)", values


def table(*kernels: tuple[str, dict[str, str]], metrics: tuple[str, ...] = ncu.METRICS) -> str:
    names = [
        "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
        "Block Size", "Grid Size", "Device", "CC", *sorted(metrics),
    ]  # fmt: skip
    units = {"gpu__time_duration.sum": "ns"}
    rows = [names, [units.get(name, "") for name in names]]
    for index, (signature, values) in enumerate(kernels):
        identity = {
            "ID": str(index), "Kernel Name": signature, "Block Size": "(256, 1, 1)",
            "Grid Size": "(264, 1, 1)",
        }  # fmt: skip
        rows.append([(identity | values).get(name, "7") for name in names])
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def site(label: str, **launches: int) -> dict[str, Any]:
    return {
        "site": label, "count": 3, "batch": 256, "dtype": "bfloat16",
        "minimum_bytes": {"forward": 500_000_000, "backward": 800_000_000},
        "launches": {name.replace("__", " "): count for name, count in launches.items()},
    }  # fmt: skip


def test_table() -> None:
    forward, other = ncu_csv.parse(TABLE)
    assert forward.function == "ForwardKernel"
    assert forward.signature.startswith("void jax_bnar::cuda::ForwardKernel<__nv_bfloat16, (int)8")
    assert (forward.grid, forward.block) == ((264, 1, 1), (256, 1, 1))
    assert forward.metrics == pytest.approx(
        {
            "dram__bytes_read.sum": 1_234_567,
            "gpu__time_duration.sum": 66.432e-6,
            "launch__shared_mem_per_block": 115_712,
            "lts__t_sector_hit_rate.pct": 53.83,
        }
    )
    assert (other.function, other.grid) == ("loop_add_fusion", (8, 2, 1))
    assert "lts__t_sector_hit_rate.pct" not in other.metrics


def test_units_that_ncu_chose_itself() -> None:
    chosen = (
        TABLE.replace('"byte","ns"', '"Mbyte","us"')
        .replace('"1,234,567","66432"', '"1.234567","66.432"')
        .replace('"byte/block"', '"Kbyte/block"')
        .replace('"115712"', '"115.712"')
    )
    assert ncu_csv.parse(chosen)[0].metrics == pytest.approx(ncu_csv.parse(TABLE)[0].metrics)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no line of names"):
        ncu_csv.parse("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    without_units = "".join(line for line in TABLE.splitlines(True) if not line.startswith('""'))
    with pytest.raises(ValueError, match="units was expected"):
        ncu_csv.parse(without_units)
    with pytest.raises(ValueError, match="no column Grid Size"):
        ncu_csv.parse(TABLE.replace("Grid Size", "Grid"))


def test_kernels_go_to_their_sites() -> None:
    kernels = ncu_csv.parse(
        table(
            launched("ForwardKernel", **FORWARD),
            ("loop_add_fusion(float *)", {}),
            launched("BackwardKernel"),
            launched("StatisticsKernel"),
            launched("NormaliseKernel"),
            launched("ReduceKernel"),
            launched("ApplyKernel"),
        )
    )
    sites = [
        site("a", Backward__cluster=1, Forward__on_chip=1),
        site(
            "b", BackwardApply__two_kernels=1, BackwardReduce__two_kernels=1,
            Normalise__two_kernels=1, Statistics__two_kernels=1,
        ),
    ]  # fmt: skip
    rows, problems = counter_rows.make_rows(sites, kernels)
    assert problems == []
    assert [(row["site"], row["pass"], row["kernel"], row["strategy"]) for row in rows] == [
        ("a", "forward", "ForwardKernel", "on_chip"),
        ("a", "backward", "BackwardKernel", "cluster"),
        ("b", "forward", "StatisticsKernel", "two_kernels"),
        ("b", "forward", "NormaliseKernel", "two_kernels"),
        ("b", "backward", "ReduceKernel", "two_kernels"),
        ("b", "backward", "ApplyKernel", "two_kernels"),
    ]
    first = rows[0]
    assert first["milliseconds"] == pytest.approx(0.2)
    assert first["dram_bytes"] == 1e9
    assert first["dram_bytes_over_minimum"] == pytest.approx(2)
    assert first["bytes_per_s"] == pytest.approx(5e12)
    assert (first["grid"], first["block"]) == ([264, 1, 1], [256, 1, 1])
    assert first["registers_per_thread"] == 7
    # Metrics that the table leaves at 7 come between these.
    assert next(iter(first["stalls"].items())) == ("long_scoreboard", 12.25)
    assert list(first["stalls"].items())[-2:] == [("barrier", 3.1), ("wait", 1.5)]
    text = list(counter_rows.summarise(rows))
    assert len(text) == 7
    assert text[1].split()[:5] == ["0.200", "2.00", "5000", "a", "ForwardKernel"]
    assert "long_scoreboard 12.2" in text[1]


def test_a_kernel_without_counters_does_not_shift_the_others() -> None:
    kernels = ncu_csv.parse(
        table(
            launched("ForwardKernel", **FORWARD),
            launched("ForwardKernel"),
            launched("BackwardKernel"),
            launched("ApplyKernel"),
        )
    )
    step = {"Forward__cluster": 1, "Backward__cluster": 1}
    rows, problems = counter_rows.make_rows([site("a", **step), site("b", **step)], kernels)
    assert [(row["site"], row["kernel"], "dram_bytes" in row) for row in rows] == [
        ("a", "ForwardKernel", True),
        ("a", "BackwardKernel", False),
        ("b", "ForwardKernel", True),
        ("b", "BackwardKernel", True),
        (None, "ApplyKernel", True),
    ]
    assert rows[0]["dram_bytes"] == 1e9
    assert problems == [
        "a: ncu has no counters of BackwardKernel, but ForwardKernel follows",
        "the program launched 1 fewer of our kernels than ncu has",
        "so it is not certain which site the counters belong to",
    ]
    assert len(list(counter_rows.summarise(rows))) == 6


def test_a_metric_without_value() -> None:
    values = {**FORWARD, "gpu__time_duration.sum": "n/a", "dram__bytes_write.sum": ""}
    kernels = ncu_csv.parse(table(launched("ForwardKernel", **values)))
    (row,), problems = counter_rows.make_rows([site("a", Forward__cluster=1)], kernels)
    assert problems == []
    assert (row["milliseconds"], row["dram_bytes"], row["bytes_per_s"]) == (None, None, None)
    assert row["dram_bytes_over_minimum"] is None
    assert row["dram_bytes_read"] == 600_000_000


def test_names_of_the_kernels_are_those_of_the_sources() -> None:
    counts = (ROOT / "cuda" / "launch" / "launch_counts.cc").read_text()
    listed = re.search(r"kKernelNames\[\] = \{(.*?)\}", counts, re.DOTALL)
    assert listed is not None
    assert re.findall(r'"(\w+)"', listed[1]) == list(counter_rows.KERNELS)
    headers = "".join(path.read_text() for path in (ROOT / "cuda" / "device").glob("*.cuh"))
    defined = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", headers)
    assert set(defined) == {function for function, _ in counter_rows.KERNELS.values()}


def test_minimum_of_both_passes_is_that_of_the_step() -> None:
    for of in RESNET50_SITES:
        for itemsize in (2, 4):
            passes = counter_rows.minimum_bytes(of, 32, itemsize)
            assert sum(passes.values()) == one_read_bytes(of, 32, itemsize)
            assert passes["backward"] - passes["forward"] == of.elements(32) * itemsize


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
