"""Times jax_bnar and its peers at the 53 BatchNorm sites of ResNet-50, forward + backward.

python -m benchmarks.sites.run --dtype float32 bfloat16 --output benchmarks/results/NAME.json
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.common.copy_bandwidth import CopyRoof
from benchmarks.common.document import begin, finish
from benchmarks.common.environment import core_count
from benchmarks.common.isa import IsaName
from benchmarks.common.json_file import write_json
from benchmarks.common.kernels import why_no_kernels
from benchmarks.common.progress import say
from benchmarks.common.sites import RESNET50_SITES, Site
from benchmarks.sites.measure import Settings, measure_sites
from benchmarks.sites.peers import PeerName
from benchmarks.sites.plot import plot
from benchmarks.sites.problem import DType, Layout
from benchmarks.sites.report import print_run


@dataclass(frozen=True)
class Options:
    """Times jax_bnar and its peers at the BatchNorm sites of ResNet-50, forward + backward."""

    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    batch: int = 16
    peers: tuple[PeerName, ...] = ("ours", "flax", "torch")
    output: Path | None = None
    """JSON file for the results, updated after each dtype; if omitted, they are only printed."""
    sites: tuple[str, ...] = ()
    """Only sites whose label ("14x14x1024 bn_add_relu") starts with one of these."""
    rounds: int = 9
    min_sample_ms: float = 20.0
    """Minimum length of a sample; shorter steps are repeated within it."""
    layout: Layout = "NHWC"
    """The order of the activations in memory."""
    isa: IsaName | None = None
    """The best instruction set that all peers may use; default: whatever each finds."""
    copy_mib_per_core: int = 512
    allow_fallback: bool = False
    """Measure even where jax_bnar has no kernels and falls back to pure JAX."""
    quick: bool = False
    """Smoke run: one small site of each form, batch 2, two short rounds, no PyTorch."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    if options.quick:
        options = _quick(options)
    return benchmark(options)


def benchmark(options: Options) -> dict[str, Any]:
    console = Console()
    document = begin(options, options.peers, allow_fallback=True)
    runs = document["runs"] = []
    environment = document["environment"]
    if environment["jax_bnar_isa"] is None and "ours" in options.peers:
        _refuse_or_warn_of_fallback(options, console)
    sites = _select(options.sites)
    settings = Settings(options.rounds, options.min_sample_ms, options.layout)
    with (
        CopyRoof(core_count(), options.copy_mib_per_core << 20) as roof,
        Progress(console=console, transient=True) as progress,
    ):
        for dtype in options.dtype:
            task = progress.add_task(dtype, total=len(sites))
            run = measure_sites(
                sites,
                options.batch,
                dtype,
                options.peers,
                roof,
                settings,
                on_site=functools.partial(_advance, progress, task),
            )
            runs.append(run)
            if options.output is not None:
                write_json(options.output, document)
            print_run(run, environment, console)
    finish(document, options, console, plot)
    return document


def _advance(progress: Progress, task: TaskID, site: Site) -> None:
    progress.advance(task)
    if not progress.console.is_terminal:
        done = progress.tasks[task]
        say(f"{done.description} {site.label}: {done.completed:.0f} of {done.total:.0f} sites done")


def _quick(options: Options) -> Options:
    return dataclasses.replace(
        options,
        batch=2,
        peers=tuple(name for name in options.peers if not name.startswith("torch")),
        sites=options.sites or ("7x7x512", "7x7x2048"),
        rounds=2,
        min_sample_ms=1.0,
        copy_mib_per_core=8,
    )


def _select(prefixes: Sequence[str]) -> list[Site]:
    sites = [site for site in RESNET50_SITES if site.label.startswith(tuple(prefixes) or "")]
    if not sites:
        labels = ", ".join(site.label for site in RESNET50_SITES)
        raise ValueError(f"--sites {' '.join(prefixes)} matches none of: {labels}.")
    return sites


def _refuse_or_warn_of_fallback(options: Options, console: Console) -> None:
    reason = f"jax_bnar would run in pure JAX here: {why_no_kernels()}"
    if not options.allow_fallback:
        raise SystemExit(f"{reason}. Or measure pure JAX with --allow-fallback.")
    console.print(f"[bold red]{reason}. The times below are those of the fallback.")


if __name__ == "__main__":
    main()
