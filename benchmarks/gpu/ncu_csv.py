"""Reads what `ncu --csv --page raw` writes: a line of names, one of units, and one for each kernel.

Before and after these there are other lines of ncu, "==PROF== ..." and warnings. What ncu could not
measure is "n/a" or empty. If the log ends in the middle of a line, because ncu was killed, that
line is left out.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final

# `--print-units base` leaves no prefix except that of nanoseconds. If ncu still chose a scale, it
# must not pass for another one.
_SCALES: Final = {
    "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3,
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One launch that was profiled.

    Attributes:
        function: the kernel's name without namespace, template arguments and parameters.
        signature: the name as ncu prints it.
        grid: blocks in x, y and z.
        block: threads in x, y and z.
        metrics: by ncu's names, in seconds, bytes and counts.
    """

    function: str
    signature: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    metrics: dict[str, float]


def parse(text: str) -> list[Kernel]:
    """Returns the kernels in the order of their launch; raises ValueError if there is no table."""
    lines = (line.strip() for line in text.splitlines())
    # Every cell of the table is quoted.
    rows = csv.reader(line for line in lines if line.startswith('"') and line.endswith('"'))
    names = next((row for row in rows if row and row[0] == "ID"), None)
    if names is None:
        raise ValueError('no line of names, which begins with "ID", in what ncu wrote')
    if missing := {"Kernel Name", "Grid Size", "Block Size"} - set(names):
        raise ValueError(f"ncu's table has no column {', '.join(sorted(missing))}: {names}")
    units = next(rows, [])
    if len(units) != len(names) or units[0] != "":
        raise ValueError(f"a line of {len(names)} units was expected below the names, not {units}")
    return list(_kernels(names, units, rows))


def _kernels(names: list[str], units: list[str], rows: Iterable[list[str]]) -> Iterator[Kernel]:
    scales = [_SCALES.get(unit.partition("/")[0], 1.0) for unit in units]
    for row in rows:
        if len(row) != len(names) or not row[0].isdecimal():
            continue
        cells = dict(zip(names, row, strict=True))
        values = zip(names, row, scales, strict=True)
        metrics = {
            name: value * scale
            for name, cell, scale in values
            if "__" in name and (value := _number(cell)) is not None
        }
        yield Kernel(
            function=function_of(cells["Kernel Name"]),
            signature=cells["Kernel Name"],
            grid=_sizes(cells["Grid Size"]),
            block=_sizes(cells["Block Size"]),
            metrics=metrics,
        )


def function_of(signature: str) -> str:
    """Returns "ForwardKernel" for "void jax_bnar::cuda::ForwardKernel<float, (int)8>(...)"."""
    return re.split(r"[\s:]+", re.split("[<(]", signature, maxsplit=1)[0].rstrip())[-1]


def _number(cell: str) -> float | None:
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value if isfinite(value) else None


def _sizes(cell: str) -> tuple[int, ...]:
    """Returns the numbers in "(132, 1, 1)"."""
    return tuple(int(number) for number in re.findall(r"\d+", cell))
