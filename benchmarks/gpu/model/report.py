"""Prints a prediction as a table that fits into 80 columns."""

from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

_FORMS: Final = {
    "bn_relu": "relu",
    "bn_add_relu": "add relu",
    "batch_norm": "",
    "dual_bn_add_relu": "dual",
}


def print_prediction(document: dict[str, Any], console: Console) -> None:
    """Prints a row for each site and direction, and the sum."""
    measured = "measured_ms" in document
    table = Table(
        title=f"MODELLED, not measured: {document['device']}, {document['dtype']},"
        f' batch {document["batch"]}, save="{document["save"]}"',
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("site", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for head in ("slab", "MB", "turns", "KB\nfly", "us", "floor", "share"):
        table.add_column(head, justify="right", no_wrap=True)
    # There is room for one of them.
    last = "meas-\nured" if measured else "Flax"
    table.add_column(last, justify="right", no_wrap=True)
    for site in document["sites"]:
        size, form = site["site"].split(" ")
        label = f"{size} {_FORMS.get(form, form)}"
        for name, head, count in (
            ("forward", label, str(site["count"])),
            ("backward", "   backward", ""),
        ):
            cells = [head, count, *_cells(site[name])]
            flax = site["flax"] and site["flax"]["predicted_us"]
            both = site["measured_us"] if measured else flax
            cells.append(_us(both) if name == "forward" else "")
            table.add_row(*cells)
    table.add_section()
    total = ["sum in ms", str(sum(site["count"] for site in document["sites"]))]
    total += ["", "", "", "", "", f"{document['sum_ms']:.2f}", f"{document['floor_ms']:.2f}"]
    total.append(f"{document['floor_share']:.0%}")
    value = document["measured_ms" if measured else "flax_ms"]
    total.append("" if value is None else f"{value:.2f}")
    table.add_row(*total, style="bold")
    console.print(table)
    counted = document["instructions"]
    console.print(
        "us: one occurrence. floor: every array once, at the rate of a copy.\n"
        "turns: slabs that a team takes one after the other, with a wait in each.\n"
        "KB fly: bytes in flight on a multiprocessor, on average.\n"
        f"Instructions: {counted['architecture']} at commit {counted['commit']}."
        " Constants: cuda/host/cost.h.\n"
        + (
            "measured: both directions."
            if measured
            else "Flax: both directions of plain Flax, at least, as XLA compiles it."
        ),
        highlight=False,
    )


def _cells(direction: dict[str, Any]) -> list[str]:
    return [
        direction["strategy"],
        str(direction["slab_channels"]),
        f"{direction['bytes'] / 1e6:.0f}",
        str(direction["rounds"]),
        f"{direction['bytes_in_flight'] / 1024:.0f}",
        _us(direction["predicted_us"]),
        _us(direction["floor_us"]),
        f"{direction['floor_share']:.0%}",
    ]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.{1 if value < 1000 else 0}f}"
