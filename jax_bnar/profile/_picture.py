"""Summaries as a figure: time by type, and the bandwidth that each operator reaches."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_bnar.profile._analysis import Summary

_MOST_KINDS = 8
_MOVING = ("Elemwise", "FusedBatchNorm")


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Draws the figure; the suffix of `path` chooses the format: svg, png or pdf."""
    figure = Figure(figsize=(13, 1.2 + 0.42 * _rows(summaries)), layout="constrained")
    bars, points = figure.subplots(1, 2)
    _bars(bars, summaries)
    _points(points, summaries)
    figure.savefig(path)


def _rows(summaries: Sequence[Summary]) -> int:
    return max(6, len(_kinds(summaries)) * max(1, len(summaries)))


def _kinds(summaries: Sequence[Summary]) -> list[str]:
    """The types with the largest share in any of the files, the largest first."""
    heaviest: dict[str, float] = {}
    for summary in summaries:
        for total in summary.kinds:
            weight = total.share if total.share is not None else total.bytes / 1e15
            heaviest[total.kind] = max(heaviest.get(total.kind, 0), weight)
    return sorted(heaviest, key=lambda kind: -heaviest[kind])[:_MOST_KINDS]


def _bars(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Draws shares of the time, because devices differ, or of the bytes if a file has no times."""
    kinds = _kinds(summaries)
    height = 0.8 / len(summaries)
    timed = all(summary.seconds is not None for summary in summaries)
    for number, summary in enumerate(summaries):
        whole = sum(total.bytes for total in summary.kinds)
        totals = {total.kind: total for total in summary.kinds}
        values, labels = [], []
        for kind in kinds:
            total = totals.get(kind)
            if total is None:
                share, label = 0.0, ""
            elif timed:
                share, label = total.share or 0.0, f"{(total.seconds or 0) * 1e3:,.2f} ms"
            else:
                share, label = total.bytes / max(whole, 1), f"{total.bytes / 1e6:,.1f} MB"
            values.append(100 * share)
            labels.append(label and f"{label}, {totals[kind].count} of them")
        places = [row + number * height for row in range(len(kinds))]
        axes.bar_label(axes.barh(places, values, height, label=summary.title), labels, padding=2)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(kinds))], kinds)
    axes.invert_yaxis()
    axes.set_xlim(0, 140)
    axes.set_xlabel("% of the kernel time" if timed else "% of the bytes")
    axes.legend(loc="lower right")


def _points(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Draws a circle for each operator at its bytes (x) and its bandwidth (y).

    The filled circles are operators that do little more than move bytes.
    """
    for number, summary in enumerate(summaries):
        for name, is_full in ((summary.title, True), (None, False)):
            found = [(m, r) for k, m, r in summary.reached if k.startswith(_MOVING) == is_full]
            if found:
                axes.scatter(
                    [moved / 1e6 for moved, _ in found],
                    [100 * reached for _, reached in found],
                    edgecolors=f"C{number}",
                    facecolors=f"C{number}" if is_full else "none",
                    label=name,
                )
    if any(summary.reached for summary in summaries):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axhline(100, color="black", linestyle="--", linewidth=1)
        axes.legend(loc="lower right")
    axes.set_xlabel("MB that an operator reads and writes")
    axes.set_ylabel("% of the device's bandwidth (full: Elemwise, FusedBatchNorm)")
