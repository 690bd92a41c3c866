"""Compiles blocks of other architectures for GPUs, and counts what they move outside convolutions.

python -m benchmarks.gpu.architectures --output benchmarks/results/NAME.json

Each block is compiled forward and backward: plain Flax, the same under `jax_bnar.fuse`, and with
our layer in place of Flax's, where the activations stay outside of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.json_file import write_json
from benchmarks.common.progress import say
from benchmarks.gpu.architectures.blocks import BLOCKS, check_names
from benchmarks.gpu.architectures.programs import VARIANTS, Variant, program_of
from benchmarks.gpu.compiled import compiler, targets
from benchmarks.gpu.compiled.document import make_document
from benchmarks.gpu.compiled.row import compile_program, count
from benchmarks.sites.problem import DType

CASES: Final[tuple[tuple[targets.GpuName, DType], ...]] = (
    ("h200", "bfloat16"),
    ("h200", "float32"),
    ("a100", "float32"),
)


@dataclass(frozen=True)
class Options:
    """Counts the bytes of blocks compiled for GPUs."""

    block: tuple[str, ...] = tuple(BLOCKS)
    output: Path | None = None
    """JSON file for the results, updated after each block."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    check_names(options.block)
    compiler.prepare()
    document = make_document(rows=[])
    for name in options.block:
        for gpu, dtype in CASES:
            say(f"compiling {name}, {dtype}, {targets.TITLES[gpu]}")
            document["rows"].append(measure(name, gpu, dtype))
        if options.output is not None:
            write_json(options.output, document)
    Console().print(table(document["rows"]))
    return document


def measure(name: str, gpu: targets.GpuName, dtype: DType) -> dict[str, Any]:
    """The row of a block: bytes, and copies and transposes of activations, of each variant."""
    found = {
        variant: count(program, compile_program(program, targets.mesh_of(gpu, 1)).program)
        for variant in VARIANTS
        for program in [program_of(name, variant, dtype)]
    }
    return {
        "block": name,
        "shape": list(BLOCKS[name].shape),
        "gpu": gpu,
        "dtype": dtype,
        "bytes": {v: each["bytes_outside_convolutions"] for v, each in found.items()},
        "copies": {v: each["activation_copies"] for v, each in found.items()},
        "calls": {v: each["calls"] for v, each in found.items()},
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each block's bytes over those of plain Flax."""
    columns = [f"{targets.TITLES[gpu]} {dtype}" for gpu, dtype in CASES]
    result = Table("block", *columns, title="bytes over plain Flax: fuse, our layer alone")
    for name in dict.fromkeys(row["block"] for row in rows):
        cells = [
            ", ".join(f"{ratio(row, variant):.2f}" for variant in VARIANTS[1:])
            for row in rows
            if row["block"] == name
        ]
        result.add_row(name, *cells)
    return result


def ratio(row: dict[str, Any], variant: Variant) -> float:
    return row["bytes"][variant] / row["bytes"]["flax"]


if __name__ == "__main__":
    main()
