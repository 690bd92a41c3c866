"""What the sum comes to where the constants of a device are other than those of an H200.

`python -m benchmarks.gpu.model --range` prints it. Each row replaces constants of cuda/host/cost.h
and keeps all others. `built_ms` is what the kernels would take with their plans, which do not know
the constants; `sure_ms` with the plans that are best for these constants; the difference is what
the plans lose. `wide_ms` is with slabs of two lines, 256 bytes of each row, everywhere.
"""

from collections.abc import Iterator
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common.kernels import planner
from benchmarks.gpu.model.devices import Device
from benchmarks.gpu.model.kinds import Save
from benchmarks.gpu.model.predict import Assumptions, cost_model, predict
from benchmarks.sites.problem import DType, itemsize

_WIDE_BYTES: Final = 256
# Their ranges say nothing about the choice of a plan, but much about the sum.
_FURTHER: Final = {
    "instructions_per_cycle": (1.5, 2.5),
    "cooperative_kernel": (1.5, 4.0),
    "share_of_l2": (0.2, 0.5),
}
_TITLES: Final = {
    "line_share": "rate of rows of 128 bytes",
    "barrier": "wait in a round, us",
    "instructions_per_cycle": "instructions a cycle",
    "skew": "spread between blocks",
    "cooperative_kernel": "cooperative kernel, us",
    "share_of_l2": "share of L2 that stays",
}
# Those whose ranges the planner knows, and whether little of it is what takes more time.
_WORSE_IF_LESS: Final = {"line_share": True, "barrier": False, "skew": False}


def cases() -> Iterator[tuple[str, dict[str, float]]]:
    """The rows: what is replaced, in words, and by name."""
    defaults = cost_model({})
    ranges: dict[str, tuple[float, float]] = planner().cuda_cost_ranges()
    yield "as assumed", {}
    for name in _WORSE_IF_LESS:
        for value in sorted({*ranges[name]} - {defaults[name]}):
            yield f"{_TITLES[name]}: {value:g} for {defaults[name]:g}", {name: value}
    for name, values in _FURTHER.items():
        for value in values:
            yield f"{_TITLES[name]}: {value:g} for {defaults[name]:g}", {name: value}
    for title, worse in (("the three at their best", False), ("the three at their worst", True)):
        yield (
            title,
            {
                name: ends[0 if _WORSE_IF_LESS[name] == worse else 1]
                for name, ends in ranges.items()
            },
        )


def over_the_range(device: Device, batch: int, dtype: DType, save: Save) -> list[dict[str, Any]]:
    """Rows with `case`, `constants`, `built_ms`, `sure_ms` and `wide_ms`."""
    wide = _WIDE_BYTES // itemsize(dtype)

    def sum_ms(assumptions: Assumptions) -> float:
        return predict(device, batch, dtype, save, assumptions)["sum_ms"]

    return [
        {
            "case": case,
            "constants": constants,
            "built_ms": sum_ms(Assumptions(constants, planner="built")),
            "sure_ms": sum_ms(Assumptions(constants, planner="sure")),
            "wide_ms": sum_ms(Assumptions(constants, slab_channels=wide, planner="sure")),
        }
        for case, constants in cases()
    ]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    lost = row["built_ms"] - row["sure_ms"]
    return (
        row["case"],
        *(f"{row[name]:.2f}" for name in ("built_ms", "sure_ms")),
        f"{max(lost, 0):.2f}",
        f"{row['wide_ms']:.2f}",
    )


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as docs/performance.md has them."""
    return [f"| {' | '.join(cells(row))} |" for row in rows]


def print_range(rows: list[dict[str, Any]], title: str, console: Console) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("where a constant is", no_wrap=True)
    for head in ("as built", "best plans", "lost", "two lines"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(
        "ms of all sites. as built: the plans of the kernels, which know the range only.\n"
        "best plans: those for these constants. two lines: the same, with rows of 256\n"
        "bytes in all slabs.",
        highlight=False,
    )
