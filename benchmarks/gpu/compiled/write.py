"""Writes all committed results about compiled programs, in about ten minutes.

python -m benchmarks.gpu.compiled.write

`make figures` then draws them, and brings the model's row of XLA up to date.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import tyro

from benchmarks.gpu.compiled import compiler, sites
from benchmarks.gpu.compiled.__main__ import compile_cases
from benchmarks.gpu.compiled.selection import default_cases

RESULTS: Final = Path(__file__).parents[2] / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(_write, args=arguments, description=__doc__)


def _write(folder: Path = RESULTS) -> None:
    compiler.prepare()
    path = folder / "gpu-compiled.json"
    compile_cases(default_cases(), path)
    print(f"wrote {path}")
    sites.write(folder / sites.RESULTS.name)


if __name__ == "__main__":
    main()
