"""A common style for all figures, on light and on dark pages."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Draw = Callable[[Figure], None]

# The palette of Okabe and Ito, whose colours are safe for colour-blind readers.
BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
PINK: Final = "#CC79A7"
GREEN: Final = "#009E73"
VERMILLION: Final = "#D55E00"
YELLOW: Final = "#F0E442"
GREY: Final = "#999999"
# Of Paul Tol's palettes, for the same readers.
INDIGO: Final = "#332288"
WINE: Final = "#882255"
TEAL: Final = "#44AA99"

PEER_COLOURS: Final = {
    "ours": BLUE,
    "ours_mask": SKY,
    "flax": ORANGE,
    "torch": PINK,
    "torch_compile": GREY,
    "onednn": VERMILLION,
    "onednn_blocked": YELLOW,
    "tensorflow": TEAL,
    "keras": INDIGO,
    "paddle": WINE,
    "cudnn": GREEN,
}
PEER_LABELS: Final = {
    "ours": "jax_bnar",
    "ours_mask": 'jax_bnar, save="mask"',
    "flax": "Flax under XLA",
    "torch": "PyTorch",
    "torch_compile": "PyTorch, torch.compile",
    "onednn": "oneDNN, NHWC",
    "onednn_blocked": "oneDNN, blocked",
    "tensorflow": "TensorFlow",
    "keras": "Keras on TensorFlow",
    "paddle": "Paddle",
    "cudnn": "cuDNN",
}

_LIBRARIES: Final = {
    "jax": "jax",
    "flax": "flax",
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "tensorflow-cpu": "TensorFlow",
    "paddlepaddle": "Paddle",
}
_INK: Final = {"light": "#1f2328", "dark": "#e6edf3"}


def settings(theme: str) -> Any:
    """Matplotlib's rcParams."""
    ink = _INK[theme]
    colours = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(colours, ink),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "font.size": 9,
        "grid.alpha": 0.3,
        "grid.color": ink,
        "legend.frameon": False,
        "savefig.transparent": True,
        "svg.hashsalt": "jax_bnar",  # so that the same results give the same file
    }


def save(folder: Path, name: str, size: tuple[float, float], draw: Draw) -> list[Path]:
    """Draws the figure with each theme, into NAME-light.svg and NAME-dark.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for theme in _INK:
        path = folder / f"{name}-{theme}.svg"
        with mpl.rc_context(settings(theme)):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            figure.savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def machine_of(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    libraries = ", ".join(
        f"{name} {versions[key]}" for key, name in _LIBRARIES.items() if versions.get(key)
    )
    processor = environment["cpu"].partition(",")[0]
    allocator = environment["allocator"]["name"]
    return f"{processor}, {environment['cores']} cores, {allocator} allocator; {libraries}"


def legend_below(figure: Figure, handles: Sequence[Artist], columns: int) -> None:
    """A legend under all panels, where it cannot cover anything."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)


def label_bars(axes: Axes, bars: Any, form: str) -> None:
    axes.bar_label(bars, fmt=form, fontsize=7, padding=2)
