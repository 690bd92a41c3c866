"""Plots the results of benchmarks.sites.run: the time of each peer at each site, and of copies.

python -m benchmarks.sites.plot benchmarks/results/NAME.json benchmarks/results/NAME.svg
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import theme

_FORMS: Final = {"bn_relu": "BN ReLU", "bn_add_relu": "BN Add ReLU", "batch_norm": "BN"}


def plot(document: dict[str, Any], path: Path) -> None:
    """Draws one panel per dtype; the file's suffix determines the format."""
    save(document["runs"], theme.machine_of(document["environment"]), path)


def save(runs: Sequence[dict[str, Any]], machine: str, path: Path) -> None:
    """Writes one file, on a white background."""
    with mpl.rc_context({**theme.settings("light"), "savefig.transparent": False}):
        figure = Figure(figsize=(11, 1 + 4.2 * len(runs)), layout="constrained")
        draw(figure, runs, machine)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def draw(figure: Figure, runs: Sequence[dict[str, Any]], machine: str) -> None:
    """Draws one panel per run."""
    panels = figure.subplots(len(runs), squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run)
    figure.suptitle(f"ResNet-50 BatchNorm sites, forward + backward: {machine}", fontsize=9)


def _layout_of(run: dict[str, Any]) -> list[str]:
    """NCHW, or nothing: older results do not name a layout, and theirs is NHWC."""
    return [run["layout"]] if run.get("layout", "NHWC") != "NHWC" else []


def _draw_run(axes: Axes, run: dict[str, Any]) -> None:
    rows, step = run["sites"], run["step"]
    names = list(step["peers"])
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        left = [site - 0.4 + width * (index + 0.5) for site in range(len(rows))]
        times = [row["peers"].get(name, {"median_ms": math.nan})["median_ms"] for row in rows]
        total = step["peers"][name]["median_ms"]
        label = f"{theme.PEER_LABELS[name]}: {total:.3g} ms per step"
        axes.bar(left, times, width, color=theme.PEER_COLOURS[name], label=label)
    # The bytes of the scheme that the kernels use: the GPU kernels keep x on chip and read it once.
    # It is an estimate and no bound: what the cache still holds need not come from memory.
    scheme = "one_read" if "one_read_floor_ms" in step else "two_read"
    estimates = [row[f"{scheme}_bytes"] / step["copy_bytes_per_s"] * 1e3 for row in rows]
    axes.hlines(
        estimates,
        [site - 0.45 for site in range(len(rows))],
        [site + 0.45 for site in range(len(rows))],
        color=mpl.rcParams["text.color"],
        linewidth=1.5,
        label=f"copy estimate: {step[f'{scheme}_floor_ms']:.3g} ms per step",
    )
    labels = [
        f"{row['height']}x{row['width']}x{row['channels']}\n{_FORMS[row['form']]}, {row['count']}x"
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("ms per call (log scale)")
    # Above the panel, where the legend cannot cover bars.
    axes.legend(
        title=", ".join([run["dtype"], f"batch {run['batch']}", *_layout_of(run)]),
        alignment="left",
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        fontsize=8,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(_plot_file, args=arguments, description=__doc__)


def _plot_file(results: tyro.conf.Positional[Path], picture: tyro.conf.Positional[Path]) -> None:
    plot(json.loads(results.read_text()), picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
