"""A figure of speed against size: the time of each peer's forward pass and step."""

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.figures import theme
from benchmarks.sites.sizes import NAMED_SHAPES, names_of


def draw(figure: Figure, document: dict[str, Any]) -> None:
    """Draws a row per dtype: microseconds of a forward pass (left) and of a step (right)."""
    runs = document["runs"]
    panels = figure.subplots(len(runs), 2, sharex=True, squeeze=False)
    for row, run in zip(panels, runs, strict=True):
        for axes, part in zip(row, ("forward", "step"), strict=True):
            _panel(axes, run, part)
    for axes in panels[-1]:
        axes.set_xlabel("elements of x")
    handles = [*panels[0][0].get_legend_handles_labels()[0], _explanation_of_crosses()]
    theme.legend_below(figure, handles, columns=len(handles))
    figure.suptitle(f"BatchNorm-Add-ReLU: {theme.machine_of(document['environment'])}", fontsize=9)


def _explanation_of_crosses() -> Line2D:
    shapes = ", ".join("x".join(map(str, shape)) for shape in NAMED_SHAPES)
    ink = mpl.rcParams["text.color"]
    return Line2D([], [], color=ink, linestyle="", marker="x", label=f"of shape {shapes}")


def _panel(axes: Axes, run: dict[str, Any], part: str) -> None:
    named = [list(shape) for shape in NAMED_SHAPES]
    rows = [size for size in run["sizes"] if size["shape"] not in named]
    others = [size for size in run["sizes"] if size["shape"] in named]
    for name in names_of(run):
        colour, label = theme.PEER_COLOURS[name], theme.PEER_LABELS[name]
        axes.plot(*_points(rows, part, name), "o-", markersize=3, color=colour, label=label)
        axes.plot(*_points(others, part, name), "x", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("us per call")
    title = {"forward": "forward", "step": "forward + backward"}[part]
    axes.set_title(f"{title}, {run['dtype']}", loc="left")
    axes.grid(True)


def _points(sizes: list[dict[str, Any]], part: str, name: str) -> tuple[list[int], list[float]]:
    measured = [size for size in sizes if name in size[part]]
    ordered = sorted(measured, key=lambda size: size["elements"])
    times = [size[part][name]["median_ms"] * 1e3 for size in ordered]
    return [size["elements"] for size in ordered], times
