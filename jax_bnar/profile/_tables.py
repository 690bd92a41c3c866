"""Summaries as tables, with several files side by side."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jax_bnar.profile._analysis import ADD, ADD_RELU, Pair, Saving, Summary, Total

_ROOFS = {
    "given": "as given",
    "copy": "a copy, measured beside the profile",
    "operator": "the most that an operator of 1 MB or more reached",
}
_COLUMNS = ("n", "us", "share", "MB", "GB/s", "% of roof", "GFLOP/s")
_WIDEST_NAME = 48


def show(summaries: Sequence[Summary], console: Console) -> None:
    for number, summary in enumerate(summaries, 1):
        _line(console, _headline(summary, number if len(summaries) > 1 else None))
    _line(console, "\nBy type of operator")
    console.print(_by_kind(summaries))
    for summary in summaries:
        what = "take longest" if summary.seconds else "have most bytes"
        _line(console, f"\n{summary.title}: the operators that {what}")
        console.print(_longest(summary))
        if summary.pairs:
            _line(console, f"\n{summary.title}: pairs of {ADD} and {ADD_RELU}")
            console.print(_pairs(summary))
        for line in _joins(summary):
            _line(console, line)


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _headline(summary: Summary, number: int | None) -> str:
    parts = [f"{summary.operators} operators"]
    if summary.device is not None:
        parts.append(f"on {summary.device}")
    if summary.seconds is None:
        parts.append("no device times")
    else:
        parts.append(f"{_us(summary.seconds)} us in kernels")
        parts.append(f"{_us(summary.span)} us from first to last")
    if summary.roof_bytes_per_s is not None:
        source = _ROOFS[summary.roof_source or "given"]
        parts.append(f"roof {summary.roof_bytes_per_s / 1e9:.1f} GB/s ({source})")
    prefix = "" if number is None else f"[{number}] "
    return f"{prefix}{summary.title}: {', '.join(parts)}"


def _by_kind(summaries: Sequence[Summary]) -> Table:
    """A table with a row for each type, in the order of the first file that has it."""
    table = Table()
    table.add_column("type")
    several = len(summaries) > 1
    columns = _COLUMNS[:-1] if several else _COLUMNS
    for number in range(1, len(summaries) + 1):
        prefix = f"[{number}] " if several else ""
        for name in columns:
            table.add_column(Text(prefix + name), justify="right")
    by_file = [{total.kind: total for total in summary.kinds} for summary in summaries]
    for kind in dict.fromkeys(kind for totals in by_file for kind in totals):
        cells = [_cells(totals.get(kind)) for totals in by_file]
        table.add_row(Text(kind), *(cell for row in cells for cell in row[: len(columns)]))
    return table


def _cells(total: Total | None) -> list[str]:
    if total is None:
        return [""] * len(_COLUMNS)
    arithmetic = total.operations_per_s or None
    return [
        str(total.count),
        _us(total.seconds),
        _percent(total.share),
        f"{total.bytes / 1e6:,.1f}",
        _giga(total.bytes_per_s),
        _percent(total.roof),
        _giga(arithmetic),
    ]


def _longest(summary: Summary) -> Table:
    table = Table()
    table.add_column("operator", no_wrap=True)
    table.add_column("type")
    for name in ("result", "us", "up to here", "MB", "GB/s", "% of roof"):
        table.add_column(name, justify="right")
    for operator, total, passed in summary.longest:
        shape = "x".join(map(str, operator.out_shapes[0])) if operator.out_shapes else ""
        table.add_row(
            Text(_shortened(operator.name)),
            Text(operator.kind),
            shape,
            _us(operator.seconds),
            _percent(passed),
            f"{operator.bytes / 1e6:,.1f}",
            _giga(total.bytes_per_s),
            _percent(total.roof),
        )
    return table


def _pairs(summary: Summary) -> Table:
    """A table of the pairs, with one row for all pairs of the same shape."""
    table = Table()
    for name in ("shape", "pairs", "us", "bytes", "in one pass"):
        table.add_column(name, justify="right")
    by_shape: dict[tuple[int, ...], list[Pair]] = defaultdict(list)
    for pair in summary.pairs:
        by_shape[pair.first.out_shapes[0]].append(pair)
    for shape, members in by_shape.items():
        times = [pair.seconds for pair in members if pair.seconds is not None]
        table.add_row(
            "x".join(map(str, shape)),
            str(len(members)),
            _us(sum(times) if times else None),
            f"{sum(pair.bytes for pair in members):,}",
            f"{sum(pair.fused_bytes for pair in members):,}",
        )
    return table


def _joins(summary: Summary) -> Iterator[str]:
    counts = Counter({total.kind: total.count for total in summary.kinds})
    saving = summary.saving
    if saving.count:
        time = f"{_us(saving.seconds)} us, " if saving.seconds is not None else ""
        yield (
            f"{saving.count} pairs of {ADD} and {ADD_RELU}: {time}{saving.bytes:,} bytes, which one"
            f" pass for each turns into {saving.fused_bytes:,} ({_percent(_fraction(saving))})"
        )
        if saving.saved_seconds is not None:
            yield (
                f"at the pairs' own {_giga(saving.bytes_per_s)} GB/s that takes"
                f" {_us(saving.fused_seconds)} us: {_us(saving.saved_seconds)} us less,"
                f" {_percent(saving.saved_share)} of the kernel time"
            )
    else:
        yield f"no pair of {ADD} and {ADD_RELU}"
    if summary.fused_joins:
        yield f"{summary.fused_joins} joins of BatchNorm, addition and ReLU are one pass already"
    elif counts[ADD_RELU]:
        yield f"{counts[ADD_RELU]} {ADD_RELU}, {counts[ADD]} {ADD} in all"


def _fraction(saving: Saving) -> float | None:
    return saving.fused_bytes / saving.bytes if saving.bytes else None


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _giga(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:,.1f}"


def _shortened(name: str) -> str:
    """The two ends of a long name: the first says what it is, the last which one of many."""
    if len(name) <= _WIDEST_NAME:
        return name
    return f"{name[: _WIDEST_NAME // 3]}...{name[3 - 2 * _WIDEST_NAME // 3 :]}"
