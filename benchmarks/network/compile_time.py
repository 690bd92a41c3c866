"""Measures how long a training step of ResNet-50 takes to trace and compile, fused and plain.

The fastest of several rounds counts, because other processes can only add to the time.

python -m benchmarks.network.compile_time --output benchmarks/results/NAME.json
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import Contention, warning
from benchmarks.common.document import begin, finish
from benchmarks.network.training_step import DType, TrainingStep


@dataclasses.dataclass(frozen=True)
class Options:
    """Time to trace, lower and compile a training step of ResNet-50."""

    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    norms: tuple[str, ...] = ("fused", "flax, fuse", "flax")
    size: int = 64
    batch: int = 8
    rounds: int = 3
    """In each round every network is compiled once, in rotating order."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks in each stage; a smoke run can use a smaller network."""
    output: Path | None = None


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    # Do not load programs that an earlier run has compiled.
    jax.config.update("jax_enable_compilation_cache", False)
    console = Console(width=80)
    document = begin(options) | {"runs": []}
    for dtype in options.dtype:
        document["runs"].append(measure(dtype, options, console))
        console.print(table(document["runs"][-1]))
    finish(document, options, console)
    return document


def measure(dtype: DType, options: Options, console: Console) -> dict[str, Any]:
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in options.norms}
    contention = Contention()
    for index in range(options.rounds):
        first = index % len(options.norms)
        for name in options.norms[first:] + options.norms[:first]:
            step = TrainingStep(name, options.size, options.batch, dtype, options.stage_sizes)
            seconds[name].append(step.seconds)
            console.print(f"{dtype}, {name}: {_elapsed(step.seconds):.1f} s")
    return {
        "dtype": dtype,
        "contention": contention.share(),
        "networks": {
            name: {"samples": samples, **min(samples, key=_elapsed)}
            for name, samples in seconds.items()
        },
    }


def _elapsed(seconds: dict[str, float]) -> float:
    return seconds["lower_s"] + seconds["compile_s"]


def table(run: dict[str, Any]) -> Table:
    result = Table("BatchNorm", "trace, lower s", "compile s", "processor s", title=run["dtype"])
    for name, network in run["networks"].items():
        result.add_row(
            name, *(f"{network[key]:.1f}" for key in ("lower_s", "compile_s", "processor_s"))
        )
    result.caption = warning([run["contention"]])
    return result


if __name__ == "__main__":
    main()
