"""Plots the results of a run."""

import pathlib

from matplotlib.figure import Figure
from speed import SiteSpeed
from training import Outcome

_STYLES = {"plain": ("tab:gray", "-", 3.0), "fused": ("tab:red", "--", 1.5)}
_LABELS = {"plain": "flax.linen.BatchNorm", "fused": "jax_bnar.flax_layers.BatchNorm"}


def save(path: pathlib.Path, outcomes: dict[str, Outcome], speeds: list[SiteSpeed]) -> None:
    """Draws two panels: the loss of both networks, and the speedup over XLA at each site."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)

    for name, (color, line, width) in _STYLES.items():
        outcome = outcomes[name]
        label = f"{_LABELS[name]}: {outcome.held_out_accuracy:.2%} held out"
        left.plot(outcome.losses, color=color, linestyle=line, linewidth=width, label=label)
    left.set(title="Training on digits", xlabel="step", ylabel="loss", yscale="log")
    left.legend()

    names = [speed.site.replace(" ", "\n") for speed in speeds]
    bars = right.barh(names, [speed.speedup for speed in speeds], color="tab:red")
    right.bar_label(bars, [f"{speed.speedup:.1f}x" for speed in speeds], padding=3)
    right.axvline(1, color="black")
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set(
        title=f"Forward + backward of one site, batch {speeds[0].batch}, float32",
        xlabel="times as fast as flax.linen.BatchNorm + add + ReLU under XLA",
    )
    figure.savefig(path, dpi=150)
