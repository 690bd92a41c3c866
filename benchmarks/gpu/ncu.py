"""Nsight Compute on the command line: where it is, what it is asked for, a run that ends in time.

The metrics are those of compute capability 9.0. ncu gives up where it is asked for one that it does
not know, so that they are held against its own list first.
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

# Warps that wait for each reason, on average, in a cycle in which one is issued. "selected" is left
# out: it counts the one that is issued.
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
    # What the multiprocessors ask for: the two halves of the L2 also ask each other.
    "l2_sectors_read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_sectors_read_hit": "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
    "l2_sectors_written": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "registers_per_thread": "launch__registers_per_thread",
    "shared_bytes_per_block": "launch__shared_mem_per_block",
    "shared_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    # Cycles in which shared memory was busy: constants that are read again for each vector show.
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    # Cycles in which an instruction was issued: near 100, instructions are the limit.
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    # Of the 32 threads of a warp, those that took part: fewer where branches diverge.
    "threads_per_instruction": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
METRICS: Final = (*COUNTERS.values(), *STALLS.values())
# Shares of the time after which ncu is asked to end, and with it what it profiles, and after which
# both are killed. Asked, it still writes what it has.
_ASKED_TO_END: Final = 0.8
_KILLED: Final = 0.95


@dataclass(frozen=True)
class Finished:
    """A process that ended, or was ended.

    Attributes:
        exit_status: None where its time was up.
        console: all that it and its children printed.
    """

    exit_status: int | None
    console: str


@dataclass(frozen=True)
class Query:
    """Which metrics ncu knows.

    Attributes:
        known: what to ask for.
        unknown: what not to ask for.
        problem: why `known` is a guess, None where it is ncu's answer.
    """

    known: tuple[str, ...]
    unknown: tuple[str, ...]
    problem: str | None = None


def find_ncu() -> str | None:
    """On PATH, in the CUDA toolkit, or in the newest folder of its own."""
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
    """Asks for the metrics of the devices that are there."""
    finished = run((ncu, "--query-metrics"), directory / "query.txt", seconds)
    listed = {line.split()[0] for line in finished.console.splitlines() if line.strip()}
    # Those of the launch itself are counted by no device, and not listed.
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
        # Locked clocks are not those of the benchmark, and stay locked where ncu is killed.
        "--clock-control", "none",
        # Each of the several passes over a kernel begins with nothing in L2, as the kernels of the
        # benchmark do, and not with what the pass before left there.
        "--cache-control", "all",
        # Ours alone, for each that is profiled runs several times. The mangled name, for ncu may
        # simplify the other.
        "--kernel-name-base", "mangled", "--kernel-name", "regex:jax_bnar",
        "--metrics", ",".join(metrics), *program,
    )  # fmt: skip


def run(
    argv: Sequence[str],
    console: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Runs a program for at most `seconds`; nothing of it is left behind."""
    begin = time.monotonic()
    with console.open("wb") as file:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Numbers without the separators of a language.
            env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(max(0.0, _ASKED_TO_END * seconds))
        except subprocess.TimeoutExpired:
            _signal(process.pid, signal.SIGTERM)
            # What was started may be a shell that ends before ncu does.
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
    """Whether there was a process in the group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def said(text: str, kind: str) -> list[str]:
    """ncu's own lines of a kind, "ERROR" or "WARNING", each once."""
    lines = (line.strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line.startswith(f"=={kind}==")))


def refused(text: str, metrics: Sequence[str]) -> tuple[str, ...]:
    """The metrics that ncu says it does not know, as the pattern that it makes of a name."""
    lines = [line for line in said(text, "ERROR") if "Failed to find metric" in line]
    return tuple(m for m in metrics if any(re.search(rf"\b{_base(m)}\b", line) for line in lines))


def _base(metric: str) -> str:
    return metric.partition(".")[0]
