"""ResNet-50 inference, folded and unfolded: time, XLA's memory analysis, and error of the logits.

python -m benchmarks.network.folded_inference --size 224 --batch 8
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.document import begin, finish
from benchmarks.common.progress import say
from jax_bnar._benchmark.timing import interleave
from jax_bnar.flax_layers import ResNet, fold_batch_norms
from jax_bnar.profile._resnet50 import random_variables

_DTYPES: Final = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Options:
    """ResNet-50 inference, folded and unfolded."""

    dtype: tuple[str, ...] = ("float32", "bfloat16")
    batch: int = 8
    size: int = 224
    """Height and width of the images."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    rounds: int = 9
    min_sample_ms: float = 20.0
    output: Path | None = None
    """JSON file for the results; if omitted, they are only printed."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document = begin(options)
    runs = [_measure(options, dtype) for dtype in options.dtype]
    for run in runs:
        _print(run, options, document["environment"], console)
    document["runs"] = runs
    finish(document, options, console, plot)
    return document


def _measure(options: Options, dtype: str) -> dict[str, Any]:
    net = ResNet(options.stage_sizes, 1000, dtype=_DTYPES[dtype])
    shape = (options.batch, options.size, options.size, 3)
    generator = np.random.default_rng(0)
    images = jnp.asarray(generator.normal(size=shape), jnp.float32)
    variables = random_variables(net, images)
    candidates = {
        "flax": (net.clone(norm=nn.BatchNorm), variables),
        "ours": (net, variables),
        "folded": fold_batch_norms(net, variables),
        "folded, xla": fold_batch_norms(net, variables, implementation="xla"),
    }
    programs = {}
    for name, (candidate, arrays) in candidates.items():
        say(f"{dtype}: compiling {name}")
        programs[name] = _compiled(candidate, arrays, images)
    say(f"{dtype}: timing, {options.rounds} rounds")
    exact = _compiled(net.clone(dtype=jnp.float32), variables, images)(variables, images)
    rows = {}
    for name, program in programs.items():
        memory = program.memory_analysis()
        logits = program(candidates[name][1], images)
        distance = jnp.max(jnp.abs(logits.astype(jnp.float32) - exact)) / jnp.max(jnp.abs(exact))
        rows[name] = {
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "distance": float(distance),
        }
    contention = Contention()
    timings = interleave(
        {
            n: lambda n=n: jax.block_until_ready(programs[n](candidates[n][1], images))
            for n in programs
        },
        rounds=options.rounds,
        min_sample_ms=options.min_sample_ms,
    )
    for name, timing in timings.items():
        rows[name] |= {
            "median_ms": timing.median_ms,
            "min_ms": timing.min_ms,
            "samples_ms": timing.samples_ms,
        }
    return {"dtype": dtype, "contention": contention.share(), "networks": rows}


def _compiled(net: ResNet, variables: Any, images: jax.Array) -> Any:
    forward = jax.jit(lambda variables, images: net.apply(variables, images, train=False))
    return forward.lower(variables, images).compile()


def plot(document: dict[str, Any], path: Path) -> None:
    """Draws milliseconds and temporary memory of each network; the suffix chooses the format."""
    figure = Figure(figsize=(9, 1 + 2.4 * len(document["runs"])), layout="constrained")
    panels = figure.subplots(len(document["runs"]), 2, squeeze=False)
    for (left, right), run in zip(panels, document["runs"], strict=True):
        networks = run["networks"]
        for axes, key, factor, unit in (
            (left, "median_ms", 1.0, "ms per batch"),
            (right, "temporary_bytes", 1e-6, "temporary MB"),
        ):
            bars = axes.barh(list(networks), [row[key] * factor for row in networks.values()])
            axes.bar_label(bars, fmt="%.0f", padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set(title=f"{run['dtype']}, {unit}")
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _print(
    run: dict[str, Any], options: Options, environment: dict[str, Any], console: Console
) -> None:
    table = Table(
        title=f"ResNet inference, {run['dtype']}, batch {options.batch},"
        f" {options.size}x{options.size}\n{environment['cpu']}, {environment['cores']} cores;"
        f" {environment['allocator']['name']} allocator"
    )
    columns = ("network", "median ms", "min ms", "temp. MB", "args. MB", "distance")
    for column in columns:
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, row in run["networks"].items():
        table.add_row(
            name,
            f"{row['median_ms']:.1f}",
            f"{row['min_ms']:.1f}",
            f"{row['temporary_bytes'] / 1e6:.1f}",
            f"{row['argument_bytes'] / 1e6:.1f}",
            f"{row['distance']:.1e}",
        )
    console.print(table)
    print_warning([run["contention"]], console)


if __name__ == "__main__":
    main()
