"""Plots the results of a run."""

import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from speed import SiteSpeed
from training import Outcome

_STYLES = {"plain": ("tab:gray", "-", 3.0), "fused": ("tab:red", "--", 1.5)}
_ALLOCATORS = {"default": "tab:red", "jemalloc": "tab:pink"}
_LABELS = {"plain": "flax.linen.BatchNorm", "fused": "jax_bnar.flax_layers.BatchNorm"}


def save(
    path: pathlib.Path, outcomes: dict[str, Outcome], speeds: list[SiteSpeed], machine: str
) -> None:
    """Draws two panels: the loss of both networks, and the speedup over XLA at each site."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)

    for name, (color, line, width) in _STYLES.items():
        outcome = outcomes[name]
        label = f"{_LABELS[name]}: {outcome.held_out_accuracy:.2%} held out"
        left.plot(outcome.losses, color=color, linestyle=line, linewidth=width, label=label)
    left.set(title="Training on digits", xlabel="step", ylabel="loss", yscale="log")
    left.legend()

    _draw_speeds(right, speeds)
    right.set(
        title=f"Forward + backward of one site, batch {speeds[0].batch}, float32\n{machine}",
        xlabel="times as fast as flax.linen.BatchNorm + add + ReLU under XLA",
    )
    figure.savefig(path, dpi=150)


def _draw_speeds(axes: Axes, speeds: list[SiteSpeed]) -> None:
    """A group of bars for each site, with one bar for each allocator."""
    sites = list(dict.fromkeys(speed.site for speed in speeds))
    allocators = [name for name in _ALLOCATORS if any(s.allocator == name for s in speeds)]
    height = 0.8 / len(allocators)
    for number, allocator in enumerate(allocators):
        ours = {speed.site: speed.speedup for speed in speeds if speed.allocator == allocator}
        bars = axes.barh(
            [row + number * height for row in range(len(sites))],
            [ours[site] for site in sites],
            height,
            color=_ALLOCATORS[allocator],
            label=f"{allocator} allocator",
        )
        axes.bar_label(bars, [f"{ours[site]:.1f}x" for site in sites], padding=3)
    middle = (len(allocators) - 1) * height / 2
    axes.set_yticks(
        [row + middle for row in range(len(sites))], [site.replace(" ", "\n") for site in sites]
    )
    axes.axvline(1, color="black")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend()
