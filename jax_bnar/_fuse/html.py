"""The report as HTML: a table for a notebook, and a self-contained page with the patterns."""

from collections.abc import Sequence
from html import escape

from jax_bnar._fuse.candidate import Candidate, described

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.refused td { color: #c44; }
pre { overflow-x: auto; }
"""


def fragment(candidates: Sequence[Candidate], next_steps: Sequence[str]) -> str:
    """What a notebook shows; its colours must suit light and dark pages."""
    return f"<div>\n{_body(candidates, next_steps)}\n</div>"


def page(candidates: Sequence[Candidate], next_steps: Sequence[str], patterns: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>jax_bnar: what was fused</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>What was fused</h1>\n{_body(candidates, next_steps)}\n"
        f"<h2>Patterns</h2>\n<pre>{escape(patterns)}</pre>\n</body>\n</html>\n"
    )


def _body(candidates: Sequence[Candidate], next_steps: Sequence[str]) -> str:
    matched = [candidate for candidate in candidates if candidate.is_matched]
    saved = sum(candidate.bytes_saved for candidate in candidates)
    steps = "".join(f"<li>{escape(step)}</li>" for step in next_steps)
    return (
        f"<p>{len(matched)} matched, {len(candidates) - len(matched)} refused,"
        f" {saved:,} bytes saved a step.</p>\n"
        f"{_table(candidates)}\n<p>What to do next:</p>\n<ul>{steps}</ul>"
    )


def _table(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "<p>nothing to fuse</p>"
    heads = ("module", "operator", "reason", "array", "line", "calls", "bytes saved")
    head = "".join(f"<th>{title}</th>" for title in heads)
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(map(_row, candidates)) + "\n</table>"


def _row(candidate: Candidate) -> str:
    failed = not candidate.dtype
    texts = (
        candidate.module or "(no module)",
        candidate.operator or ("not analysed" if failed else "refused"),
        candidate.reason,
        "" if failed else described(candidate.shape, candidate.dtype),
        candidate.line,
    )
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    numbers = "".join(
        f'<td class="number">{number:,}</td>' for number in (candidate.calls, candidate.bytes_saved)
    )
    return f'<tr class="{"matched" if candidate.is_matched else "refused"}">{cells}{numbers}</tr>'
