"""Draws the results of benchmarks.resnet50_sites: time per site of each peer, and the floor.

python -m benchmarks.plot benchmarks/results/NAME.json benchmarks/results/NAME.svg
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers
_COLOURS: Final = {
    "ours": "#0072B2",
    "ours_mask": "#56B4E9",
    "flax": "#E69F00",
    "torch": "#CC79A7",
    "torch_compile": "#999999",
}
_LABELS: Final = {
    "ours": "jax_bnar",
    "ours_mask": 'jax_bnar, save="mask"',
    "flax": "Flax under XLA",
    "torch": "PyTorch",
    "torch_compile": "PyTorch, torch.compile",
}
_FORMS: Final = {"bn_relu": "BN ReLU", "bn_add_relu": "BN Add ReLU", "batch_norm": "BN"}


def plot(document: dict[str, Any], path: Path) -> None:
    """One panel a dtype; the file's suffix chooses the format."""
    mpl.rcParams["svg.hashsalt"] = "jax_bnar"  # the same results make the same file
    runs = document["runs"]
    figure = Figure(figsize=(11, 1 + 4.2 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run)
    environment = document["environment"]
    figure.suptitle(
        f"ResNet-50 BatchNorm sites, forward + backward: {environment['cpu']},"
        f" {environment['cores']} cores, {environment['allocator']['name']} allocator",
        fontsize=10,
    )
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)


def _draw_run(axes: Axes, run: dict[str, Any]) -> None:
    rows, step = run["sites"], run["step"]
    names = list(step["peers"])
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        left = [site - 0.4 + width * (index + 0.5) for site in range(len(rows))]
        times = [row["peers"][name]["median_ms"] for row in rows]
        total = step["peers"][name]["median_ms"]
        label = f"{_LABELS[name]}: {total:.3g} ms a step"
        axes.bar(left, times, width, color=_COLOURS[name], label=label)
    floors = [row["two_read_bytes"] / step["copy_bytes_per_s"] * 1e3 for row in rows]
    axes.hlines(
        floors,
        [site - 0.45 for site in range(len(rows))],
        [site + 0.45 for site in range(len(rows))],
        color="black",
        linewidth=1.5,
        label=f"bytes / copy bandwidth: {step['two_read_floor_ms']:.3g} ms a step",
    )
    labels = [
        f"{row['height']}x{row['width']}x{row['channels']}\n{_FORMS[row['form']]}, {row['count']}x"
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("ms a call (log scale)")
    axes.set_title(f"{run['dtype']}, batch {run['batch']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(_plot_file, args=arguments, description=__doc__)


def _plot_file(results: tyro.conf.Positional[Path], picture: tyro.conf.Positional[Path]) -> None:
    plot(json.loads(results.read_text()), picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
