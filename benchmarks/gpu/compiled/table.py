"""Prints rows as tables that fit into 80 columns."""

import itertools
from collections.abc import Iterable
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.compiled.targets import TITLES

_HEADS: Final = (
    "ours",
    "fus-\nions",
    "lib",
    "conv",
    "cop-\nies",
    "GB\nours",
    "GB\nrest",
    "act.\ncop.",
    "col-\nlec.",
    "MB",
    "peak\nMiB",
    "s",
)
_GROUP: Final = ("program", "gpu", "devices", "dtype", "batch")


def print_rows(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """Prints a table for each program, GPU, number of devices and dtype."""
    for key, group in itertools.groupby(rows, lambda row: tuple(row[name] for name in _GROUP)):
        program, gpu, devices, dtype, batch = key
        table = Table(
            title=f"COMPILED, not run: {program}, {dtype}, batch {batch} on each of"
            f" {devices} {TITLES[gpu]}",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        table.add_column("", no_wrap=True)
        for head in _HEADS:
            table.add_column(head, justify="right", no_wrap=True)
        for row in group:
            table.add_row(row["variant"], *_cells(row))
        console.print(table)
    console.print(
        "ours to copies: launches by kind; most copies are of weights. GB: read and\n"
        "written, each array once in a kernel; rest: all but our calls and convolutions.\n"
        "act. cop.: copies and transposes of activations, inside fusions too. collec.,\n"
        "MB: collective operations and their results. peak: planned by XLA. s: to lower\n"
        "and compile.",
        highlight=False,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    kernels, moved = row["kernels"], row["bytes"]
    collectives = row["collectives"].values()
    rest = row["bytes_outside_convolutions"] - moved["ours"]
    return [
        str(kernels["ours"]),
        str(kernels["fusion"] + kernels["other"]),
        str(kernels["library"]),
        str(kernels["convolution"]),
        str(kernels["copy"]),
        _gigabytes(moved["ours"]),
        _gigabytes(rest),
        str(row["activation_copies"]),
        str(sum(each["operations"] for each in collectives)),
        f"{sum(each['bytes'] for each in collectives) / 1e6:.0f}",
        f"{row['peak_bytes'] / 2**20:.0f}",
        f"{row['lower_s'] + row['compile_s']:.0f}",
    ]


def _gigabytes(size: int) -> str:
    """Three digits, or more before the point."""
    return f"{size / 1e9:.{0 if size >= 1e11 else 1 if size >= 1e10 else 2}f}"
