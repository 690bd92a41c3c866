"""`dual_bn_act` against a BatchNorm and a join, at the four sites where ResNet-50 downsamples.

python -m benchmarks.sites.dual_join --output benchmarks/results/NAME.json

The activation is ReLU unless another one is given. `two` is what the join was before it had kernels
of its own: `batch_norm` of the shortcut, whose result is the residual of `bn_act`. With given
statistics it moves 5 tensors where the dual join moves 3; forward 7 and 5, because the statistics
read both inputs; a training step 19 and 13.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import jax_bnar
from benchmarks.common.agreement import check_agree
from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.document import begin, finish
from benchmarks.common.progress import say
from jax_bnar._benchmark.timing import interleave

# Height, width and channels of the blocks' results.
_SITES: Final = ((56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048))
_FORMS: Final = ("inference", "forward", "step")
_Save = Literal["y", "mask"]


@dataclass(frozen=True)
class Options:
    """The dual join against a BatchNorm and a join."""

    activation: Literal[
        "none", "relu", "relu6", "leaky_relu",
        "silu", "hard_silu", "elu", "gelu", "exact_gelu", "mish",
    ] = "relu"  # fmt: skip
    dtype: tuple[str, ...] = ("float32", "bfloat16")
    save: tuple[_Save, ...] = ("y", "mask")
    batch: int = 32
    sites: int = len(_SITES)
    """How many of the sites, the largest ones first."""
    rounds: int = 15
    min_sample_ms: float = 20.0
    output: Path | None = None
    """JSON file for the results; without one they are only printed."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document = begin(options)
    runs = [
        _measure(options, dtype, save, site)
        for dtype in options.dtype
        for save in options.save
        for site in _SITES[: options.sites]
    ]
    console.print(_table(runs, options, document["environment"]))
    print_warning((run["contention"] for run in runs), console)
    document["runs"] = runs
    finish(document, options, console)
    return document


def _one(activation: str, *arrays: Any, save: _Save) -> Any:
    return tuple(jax_bnar.dual_bn_act(*arrays, activation=activation, save=save))


def _two(
    activation: str,
    x1: Any,
    x2: Any,
    scale1: Any,
    bias1: Any,
    scale2: Any,
    bias2: Any,
    *,
    save: _Save,
) -> Any:
    z, mean2, var2 = jax_bnar.batch_norm(x2, scale2, bias2)
    y, mean1, var1 = jax_bnar.bn_act(x1, scale1, bias1, activation, z=z, save=save)
    return y, mean1, var1, mean2, var2


def _one_inference(activation: str, *arrays: Any) -> Any:
    _, _, scale1, bias1, scale2, bias2 = arrays
    # Any vectors serve as statistics, as long as the variances are positive.
    arrays = (*arrays, bias1, scale1, bias2, scale2)
    return (jax_bnar.dual_bn_act_inference(*arrays, activation=activation),)


def _two_inference(
    activation: str, x1: Any, x2: Any, scale1: Any, bias1: Any, scale2: Any, bias2: Any
) -> Any:
    z = jax_bnar.batch_norm_inference(x2, scale2, bias2, bias2, scale2)
    return (jax_bnar.bn_act_inference(x1, scale1, bias1, bias1, scale1, activation, z=z),)


def _step(join: Callable[..., Any], save: _Save) -> Callable[..., Any]:
    """(x1, x2, scale1, bias1, scale2, bias2, dy) to y, statistics and gradients."""

    def step(*operands: Any) -> Any:
        *arrays, dy = operands

        def of_arrays(*arrays: Any) -> Any:
            y, *statistics = join(*arrays, save=save)
            return y, statistics

        y, vjp, statistics = jax.vjp(of_arrays, *arrays, has_aux=True)
        return y, *statistics, *vjp(dy)

    return step


def _measure(
    options: Options, dtype: str, save: _Save, site: tuple[int, int, int]
) -> dict[str, Any]:
    operands = _operands(options.batch, dtype, site)
    joins = {"one": (_one, _one_inference), "two": (_two, _two_inference)}
    programs = {}
    for name, functions in joins.items():
        join, inference = (functools.partial(each, options.activation) for each in functions)
        lowered = jax.jit(inference).lower(*operands[:-1])
        programs[f"inference, {name}"] = (lowered.compile(), operands[:-1])
        forward = jax.jit(lambda *arrays, join=join: join(*arrays, save=save))
        programs[f"forward, {name}"] = (forward.lower(*operands[:-1]).compile(), operands[:-1])
        step = jax.jit(_step(join, save))
        programs[f"step, {name}"] = (step.lower(*operands).compile(), operands)
    for form in _FORMS:
        _check_agree(programs[f"{form}, one"], programs[f"{form}, two"], dtype)
    say(f"{'x'.join(map(str, site))} {dtype}, save={save}: timing, {options.rounds} rounds")
    runs = {
        name: lambda program=program, given=given: jax.block_until_ready(program(*given))
        for name, (program, given) in programs.items()
    }
    processor_ms: dict[str, list[float]] = {name: [] for name in runs}

    def measure_processor_time() -> None:
        # process_time counts all threads. On a shared machine it says more than elapsed time.
        for name, run in runs.items():
            start = process_time()
            run()
            processor_ms[name].append((process_time() - start) * 1e3)

    contention = Contention()
    timings = interleave(
        runs,
        rounds=options.rounds,
        min_sample_ms=options.min_sample_ms,
        each_round=measure_processor_time,
    )
    rows = {
        name: {
            "median_ms": timing.median_ms,
            "min_ms": timing.min_ms,
            "min_processor_ms": min(processor_ms[name]),
            "samples_ms": timing.samples_ms,
            "temporary_bytes": programs[name][0].memory_analysis().temp_size_in_bytes,
        }
        for name, timing in timings.items()
    }
    return {
        "site": "x".join(map(str, site)),
        "dtype": dtype,
        "save": save,
        "contention": contention.share(),
        "programs": rows,
        "speedup": {
            form: {
                key: rows[f"{form}, two"][key] / rows[f"{form}, one"][key]
                for key in ("median_ms", "min_ms", "min_processor_ms")
            }
            for form in _FORMS
        },
    }


def _operands(batch: int, dtype: str, site: tuple[int, int, int]) -> tuple[jax.Array, ...]:
    generator = np.random.default_rng(0)

    def tensor() -> jax.Array:
        return jnp.asarray(generator.standard_normal((batch, *site), np.float32), dtype)

    def vector(centre: float) -> jax.Array:
        return jnp.asarray(generator.normal(centre, 0.1, site[-1]), jnp.float32)

    x1, x2, dy = tensor(), tensor(), tensor()
    return x1, x2, vector(1), vector(0), vector(1), vector(0), dy


def _check_agree(one: Any, two: Any, dtype: str) -> None:
    """Raises AssertionError unless the results agree up to the rounding of the normalised x2.

    Only `two` stores it.
    """
    exact, other = (
        [np.asarray(array.astype(jnp.float32)) for array in program(*given)]
        for program, given in (one, two)
    )
    check_agree(exact, other, 1e-4 if dtype == "float32" else 0.05)


def _table(runs: Sequence[dict[str, Any]], options: Options, environment: dict[str, Any]) -> Table:
    table = Table(
        title=f"Dual join and {options.activation}, batch {options.batch}, NHWC;"
        f" {environment['cpu']}, {environment['cores']} cores;"
        f" {environment['allocator']['name']} allocator\n"
        "ms: medians; ratios two/one: of medians, of minima, of minima of processor time"
    )
    for column in ("site", "dtype", "save", "form"):
        table.add_column(column)
    for column in ("one", "two", "median", "min", "cpu"):
        table.add_column(column, justify="right")
    for run in runs:
        for form in _FORMS:
            medians = [run["programs"][f"{form}, {name}"]["median_ms"] for name in ("one", "two")]
            table.add_row(
                *(run["site"], run["dtype"], run["save"], form),
                *(f"{ms:.1f}" for ms in medians),
                *(f"{ratio:.2f}" for ratio in run["speedup"][form].values()),
            )
    return table


if __name__ == "__main__":
    main()
