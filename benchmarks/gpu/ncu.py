"""Nsight Compute on the command line: finds it, asks for metrics, and ends a run in time.

The metrics are those of compute capability 9.0. ncu gives up if it is asked for a metric that it
does not know, so they are first compared with its own list.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.cuda_tool import find_cuda_tool

# The average number of warps that wait for each reason, in a cycle in which one is issued.
# "selected" is left out, because it counts the one that is issued.
STALLS: Final = {
    reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    for reason in (
        "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss",
        "lg_throttle", "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc",
        "no_instruction", "not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
    )
}  # fmt: skip
COUNTERS: Final = {
    "seconds": "gpu__time_duration.sum",
    "dram_bytes_read": "dram__bytes_read.sum",
    "dram_bytes_written": "dram__bytes_write.sum",
    "dram_percent_of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    # Only what the multiprocessors ask for; the two halves of L2 also ask each other.
    "l2_sectors_read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_sectors_read_hit": "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
    "l2_sectors_written": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "registers_per_thread": "launch__registers_per_thread",
    "shared_bytes_per_block": "launch__shared_mem_per_block",
    "shared_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    # Cycles in which shared memory was busy. Constants that are read for each vector show here.
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    # The share of cycles in which an instruction was issued. Near 100, instructions are the limit.
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    # How many of the 32 threads of a warp took part: fewer where branches diverge.
    "threads_per_instruction": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
METRICS: Final = (*COUNTERS.values(), *STALLS.values())
# The shares of the time after which ncu and what it profiles are asked to end, and after which both
# are killed. If ncu is asked, it still writes what it has.
_ASKED_TO_END: Final = 0.8
_KILLED: Final = 0.95


@dataclass(frozen=True)
class Finished:
    """A process that ended by itself or was killed.

    Attributes:
        exit_status: None if its time was up.
        console: everything that it and its children printed.
    """

    exit_status: int | None
    console: str


@dataclass(frozen=True)
class Query:
    """Which metrics ncu knows.

    Attributes:
        known: what to ask for.
        unknown: what not to ask for.
        problem: why `known` is a guess, or None if it is ncu's answer.
    """

    known: tuple[str, ...]
    unknown: tuple[str, ...]
    problem: str | None = None


def find_ncu() -> str | None:
    """Finds ncu on PATH, in the CUDA toolkit, or in the newest folder of its own."""
    own = Path("/opt/nvidia/nsight-compute").glob("*/ncu")
    newest_first = sorted((path.parent for path in own), key=_version_of, reverse=True)
    return find_cuda_tool("ncu") or shutil.which(
        "ncu", path=os.pathsep.join(map(str, newest_first))
    )


def _version_of(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def version(ncu: str, directory: Path) -> str | None:
    console = run((ncu, "--version"), directory / "version.txt", seconds=20).console
    return next((line for line in console.splitlines() if line.startswith("Version")), None)


def query(ncu: str, directory: Path, seconds: float) -> Query:
    """Asks ncu for the metrics of the devices of this machine."""
    finished = run((ncu, "--query-metrics"), directory / "query.txt", seconds)
    listed = {line.split()[0] for line in finished.console.splitlines() if line.strip()}
    # No device counts those of the launch itself, and ncu does not list them.
    unknown = tuple(m for m in METRICS if not m.startswith("launch__") and _base(m) not in listed)
    if finished.exit_status != 0 or METRICS[0] in unknown:
        problem = (
            f"ncu --query-metrics, exit status {finished.exit_status}, gave no list with"
            f" {_base(METRICS[0])} in it, so all metrics are asked for; it wrote:"
            f" {finished.console.strip()[-500:]}"
        )
        return Query(METRICS, (), problem)
    return Query(tuple(m for m in METRICS if m not in unknown), unknown)


def command_line(
    ncu: str, program: Sequence[str], metrics: Sequence[str], log: Path
) -> tuple[str, ...]:
    return (
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
        "--target-processes", "all", "--profile-from-start", "off",
        # Locked clocks would not be those of the benchmark, and would stay locked if ncu is killed.
        "--clock-control", "none",
        # Each of the several runs of a kernel begins with an empty L2, as the kernels of the
        # benchmark do, and not with what the previous run left there.
        "--cache-control", "all",
        # Only ours, because each kernel that is profiled runs several times. The mangled name is
        # used because ncu may simplify the other.
        "--kernel-name-base", "mangled", "--kernel-name", "regex:jax_bnar",
        "--metrics", ",".join(metrics), *program,
    )  # fmt: skip


def run(
    argv: Sequence[str],
    console: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Runs a program for at most `seconds`, and leaves none of its processes behind."""
    begin = time.monotonic()
    with console.open("wb") as file:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Numbers must not have the separators of a language.
            env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(max(0.0, _ASKED_TO_END * seconds))
        except subprocess.TimeoutExpired:
            _signal(process.pid, signal.SIGTERM)
            # The process that was started may be a shell that ends before ncu does.
            while _signal(process.pid, 0) and time.monotonic() < begin + _KILLED * seconds:
                process.poll()
                time.sleep(0.05)
        finally:
            _signal(process.pid, signal.SIGKILL)
            # A process that waits in the driver does not even die.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
    return Finished(status, console.read_text(errors="replace"))


def _signal(group: int, number: int) -> bool:
    """Sends a signal to the group, and returns whether it had a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def said(text: str, kind: str) -> list[str]:
    """Returns ncu's own lines of a kind, "ERROR" or "WARNING", each of them once."""
    lines = (line.strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line.startswith(f"=={kind}==")))


def refused(text: str, metrics: Sequence[str]) -> tuple[str, ...]:
    """Returns the metrics that ncu, which turns names into patterns, says it does not know."""
    lines = [line for line in said(text, "ERROR") if "Failed to find metric" in line]
    return tuple(m for m in metrics if any(re.search(rf"\b{_base(m)}\b", line) for line in lines))


def _base(metric: str) -> str:
    return metric.partition(".")[0]
