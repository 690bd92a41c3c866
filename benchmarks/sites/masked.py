"""BatchNorm over padded sequences (`mask=`), whose rows have different lengths.

python -m benchmarks.sites.masked --output benchmarks/results/NAME.json

The shapes are those of the convolution module of Conformers (small, medium and large): BatchNorm
and SiLU over (batch, frames, channels), where only frames within the length of a row count. Each
step is forward and backward of a Linen layer, and `flax.linen.BatchNorm` followed by `jax.nn.silu`
is the peer. `unmasked` is our layer without a mask, which computes something else.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.document import begin, finish
from benchmarks.common.isa import IsaName
from benchmarks.common.progress import say
from jax_bnar._benchmark.memory import planned_memory
from jax_bnar._benchmark.timing import interleave
from jax_bnar.flax_layers import BatchNorm

MIB: Final = 2**20
# By the name of the model, the channels of its convolution modules.
CHANNELS: Final = {"small": 144, "medium": 256, "large": 512}
PEERS: Final = ("masked", "flax", "unmasked")


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a norm over padded sequences, forward + backward."""

    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    models: tuple[Literal["small", "medium", "large"], ...] = ("small", "medium", "large")
    batch: int = 32
    frames: int = 512
    """The longest row; the lengths of the others are spread evenly from half of it on."""
    rounds: int = 7
    min_sample_ms: float = 10.0
    isa: IsaName | None = None
    """The best instruction set that our kernels and XLA may use, as in `benchmarks.sites.run`."""
    output: Path | None = None
    """JSON file for the results; without one they are only printed."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document = begin(options)
    document["runs"] = [
        _run(options, model, dtype) for model in options.models for dtype in options.dtype
    ]
    console.print(_table(document["runs"], options))
    print_warning((run["contention"] for run in document["runs"]), console)
    finish(document, options, console)
    return document


def _run(options: Options, model: str, dtype: str) -> dict[str, Any]:
    shape = (options.batch, options.frames, CHANNELS[model])
    random = np.random.default_rng(0)
    x, dy = (jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype) for _ in range(2))
    scale, bias = (jnp.asarray(random.standard_normal(shape[-1]), jnp.float32) for _ in range(2))
    lengths = np.linspace(options.frames // 2, options.frames, options.batch).astype(int)
    mask = jnp.asarray(np.arange(options.frames) < lengths[:, None])[..., None]
    given = (x, scale, bias, mask, dy)
    compiled = {peer: jax.jit(_step(peer, dtype)).lower(*given).compile() for peer in PEERS}
    _check(compiled["masked"](*given), compiled["flax"](*given), dtype)
    steps: dict[str, Callable[[], Any]] = {
        peer: lambda step=step: jax.block_until_ready(step(*given))
        for peer, step in compiled.items()
    }
    contention = Contention()
    timings = interleave(steps, rounds=options.rounds, min_sample_ms=options.min_sample_ms)
    say(f"{model} {dtype}: done")
    memory = {peer: planned_memory(step) for peer, step in compiled.items()}
    return {
        "model": model,
        "dtype": dtype,
        "shape": shape,
        "contention": contention.share(),
        "peers": {
            peer: {**timing.as_dict(), "temporary_bytes": memory[peer].temporary}  # type: ignore[union-attr]
            for peer, timing in timings.items()
        },
    }


def _step(peer: str, dtype: str) -> Callable[..., Any]:
    """The step of a peer, from (x, scale, bias, mask, dy) to (y, dx, dscale, dbias, statistics)."""
    options: dict[str, Any] = {"use_running_average": False, "dtype": jnp.dtype(dtype)}
    layer = nn.BatchNorm(**options) if peer == "flax" else BatchNorm(**options, activation="silu")

    def forward(mask: Any, x: Any, scale: Any, bias: Any) -> Any:
        channels = x.shape[-1]
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"mean": jnp.zeros(channels), "var": jnp.ones(channels)},
        }
        named = {} if peer == "unmasked" else {"mask": mask}
        y, updated = layer.apply(variables, x, **named, mutable=["batch_stats"])
        return jax.nn.silu(y) if peer == "flax" else y, updated

    def step(x: Any, scale: Any, bias: Any, mask: Any, dy: Any) -> Any:
        y, vjp, updated = jax.vjp(functools.partial(forward, mask), x, scale, bias, has_aux=True)
        return y, *vjp(dy), updated

    return step


def _check(actual: Any, expected: Any, dtype: str) -> None:
    """Raises AssertionError if the results are not those of Flax."""
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for ours, theirs in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        ours, theirs = (np.asarray(each, np.float32) for each in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def _table(runs: Sequence[dict[str, Any]], options: Options) -> Table:
    table = Table(
        title=f"{options.batch} rows of {options.frames // 2} to {options.frames} frames,"
        " forward + backward, ms (MiB of temporaries)"
    )
    for column in ("Conformer", "dtype", *PEERS):
        table.add_column(column)
    for run in runs:
        table.add_row(
            run["model"],
            run["dtype"],
            *(
                f"{peer['median_ms']:.1f} ({peer['temporary_bytes'] / MIB:.0f})"
                for peer in (run["peers"][name] for name in PEERS)
            ),
        )
    return table


if __name__ == "__main__":
    main()
