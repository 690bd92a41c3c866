"""Times blocks of other architectures on the device that JAX has, a GPU or a CPU.

python -m benchmarks.gpu.architectures.timed --output build/gpu/architectures.json

The programs are those whose bytes `benchmarks.gpu.architectures` counts. The three variants of a
block take turns, a sample is the time of as many calls as fill it, and the dx of each is compared
with that of plain Flax before anything is timed.
"""

import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.json_file import write_json
from benchmarks.common.progress import say
from benchmarks.gpu.architectures.blocks import BLOCKS, check_names
from benchmarks.gpu.architectures.programs import VARIANTS, Variant, program_of
from benchmarks.gpu.chain import make_operands, measure, relative_error
from benchmarks.gpu.device import describe_device
from benchmarks.gpu.work import ERROR_ALLOWED
from benchmarks.sites.problem import DType

SCHEMA: Final = 1
_MOST_CALLS: Final = 1000


@dataclass(frozen=True)
class Options:
    """Times blocks with plain Flax, under `fuse` and with our layer alone."""

    block: tuple[str, ...] = tuple(BLOCKS)
    dtype: tuple[DType, ...] = ("bfloat16", "float32")
    rounds: int = 5
    """Samples of each variant."""
    sample_ms: float = 20
    divide_batch: int = 1
    """By how much the batches are divided, for a small machine."""
    output: Path | None = None
    """JSON file for the results, updated after each block."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    check_names(options.block)
    document: dict[str, Any] = {"schema": SCHEMA, "device": describe_device(), "rows": []}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, dtype in itertools.product(options.block, options.dtype):
            say(f"{name}, {dtype}")
            document["rows"].append(_measure(name, dtype, options, pool))
            if options.output is not None:
                write_json(options.output, document)
    Console().print(table(document["rows"]))
    return document


def _measure(name: str, dtype: DType, options: Options, pool: ThreadPoolExecutor) -> dict[str, Any]:
    blocks = [program_of(name, variant, dtype, options.divide_batch) for variant in VARIANTS]
    lowered = [jax.jit(each.function).lower(each.whole, each.divided) for each in blocks]
    # Compiling takes the host's cores from what is measured, so it ends before.
    compiled = list(pool.map(jax.stages.Lowered.compile, lowered))
    programs: dict[Variant, Any] = dict(zip(VARIANTS, compiled, strict=True))
    operands = make_operands((blocks[0].whole, blocks[0].divided))
    errors = _errors(programs, operands)
    samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    calls = dict.fromkeys(VARIANTS, 1)
    for index in range(options.rounds + 1):
        for variant in VARIANTS if index % 2 else VARIANTS[::-1]:
            (ms,), _ = measure(programs[variant], operands, 1, 1, calls[variant])
            if index == 0:  # It says only how many calls a sample has.
                calls[variant] = min(_MOST_CALLS, max(1, math.ceil(options.sample_ms / ms)))
            else:
                samples[variant].append(ms)
    return {"block": name, "dtype": dtype, "ms": samples, "errors": errors}


def _errors(programs: dict[Variant, Any], operands: Any) -> dict[str, float]:
    """The errors of dx over that of plain Flax; ValueError if one of them is too large."""
    dx = {variant: program(*operands)[-1][-1] for variant, program in programs.items()}
    errors = {variant: float(relative_error(dx[variant], dx["flax"])) for variant in VARIANTS}
    if not all(error <= ERROR_ALLOWED for error in errors.values()):
        raise ValueError(f"dx differs from that of plain Flax by {errors} in norm.")
    return errors


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The medians: milliseconds of plain Flax, and how much of them the others take."""
    result = Table("block", "dtype", "Flax, ms", "fuse", "our layer alone")
    for row in rows:
        flax, *others = (median(row["ms"][variant]) for variant in VARIANTS)
        ratios = [f"{other / flax:.2f}" for other in others]
        result.add_row(row["block"], row["dtype"], f"{flax:.3f}", *ratios)
    return result


if __name__ == "__main__":
    main()
