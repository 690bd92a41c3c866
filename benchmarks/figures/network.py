"""Figures of a training step of ResNet-50, fused and plain: memory, time and compile time."""

from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import theme

MIB: Final = 2**20
_COLOURS: Final = {
    "fused": theme.BLUE,
    "fused, save=mask": "#009E73",
    "flax, fuse": theme.SKY,
    "flax": theme.ORANGE,
}
_LABELS: Final = {
    "fused": "jax_bnar's layers",
    "fused, save=mask": "jax_bnar's layers, mask",
    "flax, fuse": "Flax under jax_bnar.fuse",
    "flax": "Flax",
}


def draw_step(figure: Figure, document: dict[str, Any]) -> None:
    """Draws the saved residuals, planned peak memory and milliseconds of each network."""
    runs = document["runs"]
    labels = [f"{run['batch']} x {run['size']}²\n{run['dtype']}" for run in runs]
    panels = (
        ("saved for backward, MiB", "saved_residual_bytes", 1 / MIB),
        ("peak memory, MiB", "peak_bytes", 1 / MIB),
        ("ms per step", "median_ms", 1.0),
    )
    for axes, (title, key, factor) in zip(figure.subplots(1, 3), panels, strict=True):
        values = {
            name: [run["networks"][name][key] * factor for run in runs]
            for name in runs[0]["networks"]
        }
        _bars(axes, values, labels, "%.0f")
        axes.set_title(title, loc="left")
    theme.legend_below(figure, figure.axes[0].get_legend_handles_labels()[0], columns=4)
    machine = theme.machine_of(document["environment"])
    figure.suptitle(f"A training step of ResNet-50: {machine}", fontsize=9)


def draw_compile_time(figure: Figure, document: dict[str, Any]) -> None:
    """Draws the seconds that it takes to trace, lower and compile the step."""
    runs = document["runs"]
    axes = figure.subplots()
    values = {
        name: [
            run["networks"][name]["lower_s"] + run["networks"][name]["compile_s"] for run in runs
        ]
        for name in runs[0]["networks"]
    }
    _bars(axes, values, [run["dtype"] for run in runs], "%.1f")
    axes.set_ylabel("s to trace, lower and compile")
    theme.legend_below(figure, axes.get_legend_handles_labels()[0], columns=2)
    figure.suptitle("A training step of ResNet-50", fontsize=9)


def _bars(axes: Axes, values: dict[str, list[float]], labels: list[str], form: str) -> None:
    width = 0.8 / len(values)
    for index, (name, heights) in enumerate(values.items()):
        left = [place - 0.4 + width * (index + 0.5) for place in range(len(heights))]
        bars = axes.bar(left, heights, width, color=_COLOURS[name], label=_LABELS[name])
        theme.label_bars(axes, bars, form)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
