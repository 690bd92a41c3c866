"""The report as HTML: a table for a notebook, and a self-contained page with the patterns."""

import html as escaping
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_bnar._fuse import paddle_form

if TYPE_CHECKING:
    from jax_bnar._fuse.report import FusionReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.refused td { color: #c44; }
svg { display: block; margin: .5rem 0 1.5rem; max-width: 100%; }
svg text { font: 12px ui-monospace, monospace; fill: currentColor; }
svg rect { fill: #4a7fb022; stroke: #4a7fb0; }
svg path { stroke: currentColor; fill: none; }
"""
_WIDTH, _HEIGHT, _GAP = 260, 34, 90


def fragment(report: "FusionReport") -> str:
    """What a notebook shows; its colours must suit light and dark pages."""
    return f"<div>\n{_summary(report)}\n{_table(report)}\n{_next_steps(report)}\n</div>"


def page(report: "FusionReport") -> str:
    operators = dict.fromkeys(c.operator for c in report.candidates if c.operator is not None)
    drawings = "\n".join(
        f"<h3>{pattern.name}</h3>\n<p>before</p>\n{_drawing(pattern.source)}\n"
        f"<p>after</p>\n{_drawing(pattern.result)}"
        for pattern in paddle_form.patterns(operators)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>jax_bnar: what was fused</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>What was fused</h1>\n{_summary(report)}\n{_table(report)}\n{_next_steps(report)}\n"
        f"<h2>Patterns</h2>\n{drawings}\n</body>\n</html>\n"
    )


def _summary(report: "FusionReport") -> str:
    return (
        f"<p>{len(report.matched)} matched, {len(report.refused)} refused,"
        f" {report.bytes_saved:,} bytes saved a step.</p>"
    )


def _next_steps(report: "FusionReport") -> str:
    steps = (f"<li>{escaping.escape(step)}</li>" for step in report.next_steps)
    return f"<p>What to do next:</p>\n<ul>{''.join(steps)}</ul>"


def _table(report: "FusionReport") -> str:
    if not report.candidates:
        return "<p>nothing to fuse</p>"
    rows = "\n".join(
        f'<tr class="{"matched" if c.is_matched else "refused"}">'
        + "".join(
            f"<td>{escaping.escape(text)}</td>"
            for text in (
                c.module or "(no module)",
                c.operator or "refused",
                c.reason,
                f"{c.dtype}[{', '.join(map(str, c.shape))}]",
                c.line,
            )
        )
        + f'<td class="number">{c.calls}</td><td class="number">{c.bytes_saved:,}</td></tr>'
        for c in report.candidates
    )
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("module", "operator", "reason", "array", "line", "calls", "bytes saved")
    )
    return f"<table>\n<tr>{heads}</tr>\n{rows}\n</table>"


def _drawing(operators: Sequence[paddle_form.Operator]) -> str:
    """A row of boxes, with an arrow from each operator to those that read its tensors."""
    givers = {tensor: i for i, op in enumerate(operators) for tensor in op.outputs}
    height = _HEIGHT + 24 * len(operators) + 40
    width = len(operators) * (_WIDTH + _GAP) - _GAP + 2
    parts = []
    for i, op in enumerate(operators):
        left = i * (_WIDTH + _GAP) + 1
        parts.append(f'<rect x="{left}" y="1" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>')
        parts.append(f'<text x="{left + 8}" y="22">{escaping.escape(op.name)}</text>')
        between: dict[int, list[str]] = {}
        for tensor in op.inputs:
            if tensor in givers and givers[tensor] != i:
                between.setdefault(givers[tensor], []).append(tensor)
        for giver, tensors in between.items():
            start = giver * (_WIDTH + _GAP) + _WIDTH // 2
            end, level = left + _WIDTH // 2, _HEIGHT + 14 + 24 * (i - giver)
            parts.append(f'<path d="M{start} {_HEIGHT} V{level} H{end} V{_HEIGHT + 2}"/>')
            label = tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more"
            parts.append(f'<text x="{start + 6}" y="{level - 4}">{escaping.escape(label)}</text>')
    drawn = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"{drawn}\n</svg>"
    )
