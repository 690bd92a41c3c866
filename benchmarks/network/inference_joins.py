"""The 16 residual joins of ResNet-50's inference on the CPU: one pass, XLA's own, and two passes.

A profile of MegEngine (batch 10, float32, NCHW, BatchNorm folded into the convolutions) has 16
joins, each in two passes: ADD, `t = conv + shortcut`, and FUSE_ADD_RELU, `relu(t + bias)`. Three
forms take turns:

    two_passes   these two, as two programs of XLA, so that t is an array in memory
    xla          relu(conv + shortcut + bias) in one program, which XLA fuses by itself
    ours         the same sum as bn_add_relu_inference without scale, of mean 0 and variance 1

Bytes are those that the instructions of the compiled programs read and write. The processor time
of all threads is given as well as the elapsed time, because other processes disturb it less.

python -m benchmarks.network.inference_joins --output benchmarks/results/NAME.json
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.copy_bandwidth import CopyRoof
from benchmarks.common.document import begin, finish
from benchmarks.common.environment import core_count
from benchmarks.gpu.inference_joins import JOINS, ours, xla
from jax_bnar._benchmark.timing import interleave
from jax_bnar.profile import _hlo

NAMES: Final = ("two_passes", "xla", "ours")
_ERROR_ALLOWED: Final = 1e-6
_SUMMED: Final = ("bytes", "median_ms", "min_ms", "processor_ms")


@dataclass(frozen=True)
class Options:
    """The 16 residual joins of ResNet-50's inference on the CPU."""

    batch: int = 10
    rounds: int = 15
    min_sample_ms: float = 20.0
    copy_mib_per_core: int = 256
    joins: tuple[str, ...] = ()
    """Only joins whose shape ("1024x14x14") starts with one of these."""
    output: Path | None = None
    """JSON file for the results; without one they are only printed."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document = begin(options)
    joins = {
        shape: count
        for shape, count in JOINS.items()
        if "x".join(map(str, shape)).startswith(options.joins or "")
    }
    if not joins:
        raise ValueError(f"--joins {' '.join(options.joins)} fits none of {list(JOINS)}.")
    with CopyRoof(core_count(), options.copy_mib_per_core << 20) as roof:
        rows = [
            _measure(shape, options, roof) | {"shape": shape, "count": count}
            for shape, count in joins.items()
        ]
    total = summarise(rows)
    document |= {"joins": rows, "total": total}
    _print(rows, total, options, document["environment"], console)
    finish(document, options, console)
    return document


def _add(x: jax.Array, z: jax.Array) -> jax.Array:
    return x + z


def _add_relu(total: jax.Array, bias: jax.Array) -> jax.Array:
    shape = (1, -1, *[1] * (total.ndim - 2))
    return jax.nn.relu(total + jnp.broadcast_to(bias.reshape(shape), total.shape))


def _measure(shape: tuple[int, int, int], options: Options, roof: CopyRoof) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x, z = (
        jnp.asarray(random.standard_normal((options.batch, *shape)), jnp.float32) for _ in range(2)
    )
    bias = jnp.asarray(random.standard_normal(shape[0]), jnp.float32)
    add = jax.jit(_add).lower(x, z).compile()
    add_relu = jax.jit(_add_relu).lower(x, bias).compile()
    in_one = {
        name: jax.jit(step).lower(x, z, bias).compile()
        for name, step in (("xla", xla), ("ours", ours))
    }
    runs: dict[str, Callable[[], Any]] = {
        "two_passes": lambda: jax.block_until_ready(add_relu(add(x, z), bias)),
        **{
            name: lambda program=program: jax.block_until_ready(program(x, z, bias))
            for name, program in in_one.items()
        },
    }
    moved = {
        "two_passes": _bytes(add) + _bytes(add_relu),
        **{name: _bytes(program) for name, program in in_one.items()},
    }
    exact = np.maximum(
        np.asarray(x, np.float64) + np.asarray(z, np.float64) + np.asarray(bias)[:, None, None], 0
    )
    for name, run in runs.items():
        error = np.abs(np.asarray(run()) - exact).max() / np.abs(exact).max()
        if not error <= _ERROR_ALLOWED:
            raise ValueError(f"{name} differs from the sum in float64 by {error} of its maximum.")
    del exact
    copies: list[float] = []
    processor = {name: _ProcessorTime(run) for name, run in runs.items()}
    contention = Contention()
    timings = interleave(
        processor,
        rounds=options.rounds,
        min_sample_ms=options.min_sample_ms,
        each_round=lambda: copies.append(roof.measure()),
    )
    return {
        "contention": contention.share(),
        "copy_bytes_per_s": median(copies),
        "peers": {
            name: {
                "bytes": moved[name],
                "median_ms": timing.median_ms,
                "min_ms": timing.min_ms,
                "processor_ms": processor[name].mean_ms(),
                "samples_ms": timing.samples_ms,
            }
            for name, timing in timings.items()
        },
    }


class _ProcessorTime:
    """Calls a step, and adds up the processor time that its calls take in all threads.

    The result is a mean, because Linux may account for another thread's time a tick late.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._seconds = 0.0
        self._calls = 0

    def __call__(self) -> None:
        start = process_time()
        self._run()
        self._seconds += process_time() - start
        self._calls += 1

    def mean_ms(self) -> float:
        return self._seconds / self._calls * 1e3


def _bytes(program: Any) -> int:
    return sum(operator.bytes for operator in _hlo.operators(program.as_text() or ""))


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the joins, and the ratio of ours to each peer: of the sums, and in each round.

    The peers of a round ran next to each other, so what else the machine did disturbs the median of
    the rounds' ratios less than the times.
    """
    sums = {
        name: {
            field: sum(row["count"] * row["peers"][name][field] for row in rows)
            for field in _SUMMED
        }
        for name in NAMES
    }

    def of_rounds(name: str) -> list[float]:
        samples = [[row["peers"][n]["samples_ms"] for row in rows] for n in ("ours", name)]
        counts = [row["count"] for row in rows]
        rounds = range(len(samples[0][0]))
        return [
            sum(c * s[r] for c, s in zip(counts, samples[0], strict=True))
            / sum(c * s[r] for c, s in zip(counts, samples[1], strict=True))
            for r in rounds
        ]

    return {
        "peers": sums,
        "ours_over": {
            name: {
                **{field: sums["ours"][field] / sums[name][field] for field in sums[name]},
                "median_of_rounds": median(of_rounds(name)),
            }
            for name in NAMES
            if name != "ours"
        },
    }


def _print(
    rows: Sequence[dict[str, Any]],
    total: dict[str, Any],
    options: Options,
    environment: dict[str, Any],
    console: Console,
) -> None:
    table = Table(
        title=f"inference joins, float32, NCHW, batch {options.batch}\n{environment['cpu']},"
        f" {environment['cores']} cores; {environment['allocator']['name']} allocator"
    )
    for column in ("shape", "joins", "peer", "MB", "median ms", "min ms", "processor"):
        table.add_column(column, justify="left" if column in ("shape", "peer") else "right")
    everything = {
        "peers": total["peers"],
        "shape": ("all",),
        "count": sum(r["count"] for r in rows),
    }
    for row in (*rows, everything):
        for name in NAMES:
            found = row["peers"][name]
            table.add_row(
                "x".join(map(str, row["shape"])) if name == NAMES[0] else "",
                str(row["count"]) if name == NAMES[0] else "",
                name,
                f"{found['bytes'] / 1e6:.1f}",
                *(f"{found[field]:.2f}" for field in _SUMMED[1:]),
            )
    console.print(table)
    for name, ratios in total["ours_over"].items():
        console.print(
            f"ours over {name}: bytes {ratios['bytes']:.3f}; time: medians"
            f" {ratios['median_ms']:.2f}, minima {ratios['min_ms']:.2f}, median of the rounds"
            f" {ratios['median_of_rounds']:.2f}; processor time"
            f" {ratios['processor_ms']:.2f}"
        )
    print_warning((row["contention"] for row in rows), console)


if __name__ == "__main__":
    main()
