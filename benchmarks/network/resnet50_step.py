"""Measures a training step of ResNet-50, fused and in plain Flax: time, memory, saved residuals.

python -m benchmarks.network.resnet50_step --output benchmarks/results/NAME.json
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import Contention, warning
from benchmarks.common.document import begin, finish
from benchmarks.common.isa import IsaName
from benchmarks.common.json_file import write_json
from benchmarks.common.progress import say
from benchmarks.figures.network import draw_step
from benchmarks.network.training_step import DType, TrainingStep, check_losses
from jax_bnar._benchmark.timing import interleave

MIB: Final = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a training step of ResNet-50 with fused and with plain BatchNorm, interleaved."""

    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    sizes: tuple[tuple[int, int], ...] = ((64, 16), (224, 8))
    """Pairs of the images' height and width, and the batch size."""
    norms: tuple[str, ...] = ("fused", "flax")
    """"fused", "fused, save=mask", "flax, fuse" (plain Flax under `jax_bnar.fuse`), "flax"."""
    rounds: int = 7
    """Samples of each network."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks in each stage; a smoke run can use a smaller network."""
    isa: IsaName | None = None
    """The best instruction set that our kernels and XLA may use, as in `benchmarks.sites.run`."""
    output: Path | None = None
    """JSON file for the results, updated after each size and dtype."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document = begin(options) | {"runs": []}
    for size, batch in options.sizes:
        for dtype in options.dtype:
            document["runs"].append(measure(size, batch, dtype, options))
            if options.output is not None:
                write_json(options.output, document)
            console.print(table(document["runs"][-1]))
    finish(document, options, console, _plot)
    return document


def _plot(document: dict[str, Any], picture: Path) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    draw_step(figure, document)
    figure.savefig(picture, metadata={"Date": None})


def measure(size: int, batch: int, dtype: DType, options: Options) -> dict[str, Any]:
    """Time, memory and residuals of each network's step."""
    label = f"{batch} x {size}x{size}, {dtype}"
    steps = {}
    for name in options.norms:
        say(f"{label}: compiling {name}")
        steps[name] = TrainingStep(name, size, batch, dtype, options.stage_sizes)
    say(f"{label}: timing, {options.rounds} rounds")
    first = {name: step.run() for name, step in steps.items()}
    check_losses(first, dtype)
    contention = Contention()
    timings = interleave(
        {name: step.run for name, step in steps.items()},
        rounds=options.rounds,
        min_sample_ms=0.0,
    )
    return {
        "size": size,
        "batch": batch,
        "dtype": dtype,
        "contention": contention.share(),
        "networks": {
            name: {
                "median_ms": timings[name].median_ms,
                "min_ms": timings[name].min_ms,
                "samples_ms": timings[name].samples_ms,
                "first_loss": first[name],
                **step.memory(),
            }
            for name, step in steps.items()
        },
    }


def table(run: dict[str, Any]) -> Table:
    title = f"{run['batch']} x {run['size']}x{run['size']}, {run['dtype']}"
    result = Table("BatchNorm", "ms per step", "peak MiB", "temp. MiB", "resid. MiB")
    result.title = title
    for name, network in run["networks"].items():
        sizes = (network[f"{kind}_bytes"] for kind in ("peak", "temporary", "saved_residual"))
        result.add_row(
            name,
            f"{network['median_ms']:.0f}",
            *(f"{size / MIB:.0f}" for size in sizes),
        )
    result.caption = warning([run["contention"]])
    return result


if __name__ == "__main__":
    main()
