"""Compiles ResNet-50 for GPUs on a machine without one, and counts what would run there.

python -m benchmarks.gpu.compiled                       # the usual questions, in ten minutes
python -m benchmarks.gpu.compiled --program operator    # every option makes a selection
python -m benchmarks.gpu.compiled --gpu b200 --variant ours flax --dtype f32 --devices 8 --json
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

from benchmarks.common.json_file import write_json
from benchmarks.common.progress import say
from benchmarks.gpu.compiled import compiler, targets
from benchmarks.gpu.compiled.document import make_document
from benchmarks.gpu.compiled.programs import ProgramName, Variant, check_variant
from benchmarks.gpu.compiled.row import Case, measure
from benchmarks.gpu.compiled.selection import DTypeName, Selection, default_cases
from benchmarks.gpu.compiled.table import print_rows


@dataclass(frozen=True)
class Options:
    """Counts kernels, bytes, copies, collectives and memory of programs compiled for GPUs.

    Without options that select, the default table; with any, all combinations, where step, ours
    and flax, bf16, and one H200 stand for what is not given.
    """

    gpu: tuple[targets.GpuName, ...] = ()
    program: tuple[ProgramName, ...] = ()
    variant: tuple[Variant, ...] = ()
    dtype: tuple[DTypeName, ...] = ()
    devices: tuple[int, ...] = ()
    batch: int | None = None
    """Images on each device; by default 256, and 32 in evaluation."""
    json: bool = False
    """Print JSON."""
    output: Path | None = None
    """JSON file for the results, updated after each row."""

    def cases(self) -> list[Case]:
        """What to compile.

        Raises:
            ValueError: a number of devices or images is impossible, or a variant of a program.
        """
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}.")
        for number in self.devices:
            targets.topology(number)
        names = ("gpu", "program", "variant", "dtype", "devices", "batch")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        if not given:
            return default_cases()
        cases = list(dataclasses.replace(Selection(), **given).cases())
        for case in cases:
            check_variant(case.program, case.variant)
        return cases


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        cases = options.cases()
    except ValueError as error:
        raise SystemExit(str(error)) from error
    compiler.prepare()
    document = compile_cases(cases, options.output)
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        print_rows(document["rows"], Console())
    return document


def compile_cases(cases: Iterable[Case], output: Path | None = None) -> dict[str, Any]:
    """Compiles all cases and returns the document, which is written to `output` after each."""
    document = make_document(rows=[])
    for case in cases:
        say(f"compiling {case}")
        document["rows"].append(measure(case))
        jax.clear_caches()  # A program of 1024 devices occupies hundreds of megabytes.
        if output is not None:
            write_json(output, document)
    return document


if __name__ == "__main__":
    main()
