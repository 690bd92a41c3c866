"""Page faults and times of jax_bnar with huge pages for its results and without, on Linux.

python -m benchmarks.sites.page_faults --output benchmarks/results/NAME.json

A process reads JAX_BNAR_HUGE_PAGES once, so each setting has processes of its own, which take
turns. Nobody else's results are affected by it, so there are no peers.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.document import begin, finish
from benchmarks.common.progress import say
from benchmarks.common.sites import RESNET50_SITES
from benchmarks.sites import peers
from benchmarks.sites.problem import DType, make_problem
from jax_bnar._kernels import targets

_VARIABLE: Final = "JAX_BNAR_HUGE_PAGES"
_SETTINGS: Final = ("0", "1")
# What is kept of the calls of a site: the median of each. malloc maps a block of less than 32 MB
# afresh in some calls and not in others, so the minimum would say that nothing is to be gained.
_KINDS: Final = ("faults", "ms", "processor_ms")


@dataclass(frozen=True)
class Options:
    """Page faults and times of jax_bnar with huge pages for its results and without."""

    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    batch: int = 16
    sites: int = len(RESNET50_SITES)
    """How many of the distinct sites, from the stem on."""
    calls: int = 10
    processes: int = 3
    """How many processes of each setting."""
    output: Path | None = None
    """JSON file for the results; without one they are only printed."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    document = begin(options)
    if not targets.huge_pages():
        raise SystemExit(
            f"{_VARIABLE} is 0, or this system has no huge pages on request:"
            " /sys/kernel/mm/transparent_hugepage/enabled must say [madvise]."
        )
    runs = [_measure(options, dtype) for dtype in options.dtype]
    console = Console()
    for run in runs:
        console.print(_table(run))
    document["runs"] = runs
    finish(document, options, console)
    return document


def _measure(options: Options, dtype: DType) -> dict[str, Any]:
    calls: dict[str, list[list[dict[str, float]]]] = {}
    for process in range(options.processes):
        for setting in _SETTINGS:
            say(f"{dtype}, {_VARIABLE}={setting}, process {process + 1} of {options.processes}")
            measured = _in_process(options, dtype, setting)
            before = calls.get(setting, [[] for _ in measured])
            calls[setting] = [a + b for a, b in zip(before, measured, strict=True)]
    sites = RESNET50_SITES[: options.sites]
    medians = {
        setting: [{kind: median(call[kind] for call in site) for kind in _KINDS} for site in rows]
        for setting, rows in calls.items()
    }
    return {
        "dtype": dtype,
        "sites": [
            {"site": site.label, "count": site.count}
            | {setting: rows[i] for setting, rows in medians.items()}
            for i, site in enumerate(sites)
        ],
        "step": {
            setting: {
                kind: sum(s.count * row[kind] for s, row in zip(sites, rows, strict=True))
                for kind in _KINDS
            }
            for setting, rows in medians.items()
        },
    }


def _in_process(options: Options, dtype: DType, setting: str) -> list[list[dict[str, float]]]:
    arguments = (dtype, options.batch, options.sites, options.calls)
    program = (
        f"import json\nfrom benchmarks.sites.page_faults import {of_sites.__name__} as measure\n"
        f"print(json.dumps(measure{arguments}))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, _VARIABLE: setting},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout)


def of_sites(dtype: DType, batch: int, sites: int, calls: int) -> list[list[dict[str, float]]]:
    """Page faults, time and processor time of each call at each site, in this process."""
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for site in RESNET50_SITES[:sites]:
        run = peers.build("ours", make_problem(site, batch, dtype)).run
        for _ in range(3):
            run()
        rows.append([_sample(run) for _ in range(calls)])
    return rows


def _sample(run: Callable[[], Any]) -> dict[str, float]:
    faults, start, processor = _minor_faults(), perf_counter(), process_time()
    run()
    return {
        "ms": (perf_counter() - start) * 1e3,
        "processor_ms": (process_time() - processor) * 1e3,
        "faults": _minor_faults() - faults,
    }


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _table(run: dict[str, Any]) -> Table:
    table = Table(
        "site", title=f"{run['dtype']}: medians of one call with {_VARIABLE}=0, then with 1"
    )
    for head in ("n", *(f"{kind} {setting}" for kind in _KINDS for setting in _SETTINGS)):
        table.add_column(head.replace("processor_ms", "cpu ms"), justify="right")

    def numbers(row: dict[str, Any]) -> list[str]:
        return [
            f"{row[setting][kind]:.{0 if kind == 'faults' else 2}f}"
            for kind in _KINDS
            for setting in _SETTINGS
        ]

    for row in run["sites"]:
        table.add_row(
            row["site"].replace("batch_norm", "").replace("bn_", "").replace("_", " "),
            str(row["count"]),
            *numbers(row),
        )
    table.add_section()
    total = str(sum(row["count"] for row in run["sites"]))
    table.add_row("step", total, *numbers(run["step"]), style="bold")
    return table


if __name__ == "__main__":
    main()
