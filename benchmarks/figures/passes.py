"""A figure of what is fused: each square is a tensor that is read from or written to memory."""

from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.figures.theme import BLUE, ORANGE


class Kernel(NamedTuple):
    """A pass over memory, and the tensors that it reads and writes."""

    name: str
    reads: str
    writes: str


# e is dy where y > 0, which is also dz. The fused backward pass reads y for the sign of the ReLU.
LAYERS: Final = {
    "forward": (
        Kernel("statistics", "x", ""),
        Kernel("normalise", "x", "u"),
        Kernel("add", "u z", "v"),
        Kernel("ReLU", "v", "y"),
    ),
    "backward": (
        Kernel("ReLU", "dy v", "e"),
        Kernel("sums", "e x", ""),
        Kernel("apply", "e x", "dx"),
    ),
}
FUSED: Final = {
    "forward": (Kernel("statistics", "x", ""), Kernel("normalise, add, ReLU", "x z", "y")),
    "backward": (Kernel("sums", "dy y x", "dz"), Kernel("apply", "dz x", "dx")),
}
_GAP: Final = 0.35


def count(kernels: tuple[Kernel, ...]) -> int:
    return sum(len(kernel.reads.split()) + len(kernel.writes.split()) for kernel in kernels)


def draw(figure: Figure) -> None:
    axes = figure.subplots(2, 1)
    for panel, direction in zip(axes, ("forward", "backward"), strict=True):
        _panel(panel, direction)


def _panel(axes: Axes, direction: str) -> None:
    rows = (("layer by layer", LAYERS[direction]), ("fused", FUSED[direction]))
    for row, (label, kernels) in enumerate(rows):
        bottom = -1.9 * row
        axes.text(-0.3, bottom + 0.4, label, ha="right", va="center", fontsize=9)
        left = 0.0
        for kernel in kernels:
            tensors = [(name, BLUE) for name in kernel.reads.split()]
            tensors += [(name, ORANGE) for name in kernel.writes.split()]
            axes.text(left, bottom + 0.95, kernel.name, ha="left", va="bottom", fontsize=7.5)
            for name, colour in tensors:
                axes.add_patch(Rectangle((left, bottom), 0.9, 0.8, color=colour))
                axes.text(left + 0.45, bottom + 0.4, name, color="white", ha="center", va="center")
                left += 1
            left += _GAP
        axes.text(left + 0.1, bottom + 0.4, f"{count(kernels)} tensors", va="center", weight="bold")
    axes.set_xlim(-2.9, 12)
    axes.set_ylim(-2.0, 1.6)
    axes.set_axis_off()
    legend = "   (blue: read, orange: written)" if direction == "forward" else ""
    axes.set_title(f"{direction}{legend}", loc="left", fontsize=9)
