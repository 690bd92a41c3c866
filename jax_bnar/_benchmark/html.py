"""The report as an HTML table, for notebooks."""

import html as escaping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jax_bnar._benchmark.report import BenchmarkReport

_HEADS: Final = ("", "", "median ms", "min ms", "peak MiB", "temporary MiB", "residual MiB")


def fragment(report: "BenchmarkReport") -> str:
    """What a notebook shows: the table without colours, and the notes below it."""
    rows = []
    for m in report.measurements:
        sizes = (m.peak_bytes, m.temporary_bytes, m.residual_bytes)
        numbers = [f"{m.median_ms:.4g}", f"{m.min_ms:.4g}"]
        numbers += ["" if size is None else f"{size / 2**20:.4g}" for size in sizes]
        rows.append(_row("td", m.what, m.name, *numbers))
    passes = dict.fromkeys(m.what for m in report.measurements)
    speedups = [
        f"{what}: fused is {report.speedup(what):.2f} times as fast"
        for what in passes
        if report.matched != 0
    ]
    notes = "\n".join(map(escaping.escape, (*speedups, *report.notes)))
    caption = f"<caption>{escaping.escape(f'{report.function} on {report.device}')}</caption>"
    table = "\n".join(["<table>", caption, _row("th", *_HEADS), *rows, "</table>"])
    return f"<div>\n{table}\n<pre>{notes}</pre>\n</div>"


def _row(tag: str, *cells: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escaping.escape(cell)}</{tag}>' for cell in cells)}</tr>"
