"""A figure of ResNet-50's training step as XLA compiles it for a GPU: nothing has run."""

from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import theme

_LABELS: Final = {
    "ours": "jax_bnar",
    "ours_mask": "mask",
    "ours_xla": 'pure JAX\n("xla")',
    "fuse": "Flax,\nfuse",
    "flax": "Flax",
    # Shown by its memory alone.
    "ours_remat": "jax_bnar, recomputing y",
}
_DTYPES: Final = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Of these, convolutions are left out: they are the same for all.
_BYTES: Final = (
    ("our calls", ("ours",), theme.BLUE),
    ("fusions", ("fusion", "other"), theme.ORANGE),
    ("copies, libraries", ("copy", "library"), theme.GREY),
)


def rows_of(document: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows of the training step with these fields."""
    wanted = {"program": "step", **wanted}
    return [row for row in document["rows"] if all(row[k] == v for k, v in wanted.items())]


def draw(figure: Figure, document: dict[str, Any]) -> None:
    """Draws bytes by variant and by dtype, planned memory, and launches."""
    panels = figure.subplots(1, 4, width_ratios=(5, 4, 4, 5))
    single = rows_of(document, gpu="h200", devices=1)
    variants = [
        row for row in single if row["dtype"] == "bfloat16" and "remat" not in row["variant"]
    ]
    labels = [_LABELS[row["variant"]] for row in variants]
    _stack(panels[0], variants, labels, "bytes", _BYTES, 1e9)
    panels[0].set_title("GB, bf16", loc="left")
    panels[0].margins(y=0.4)  # room for the legend
    panels[0].legend(fontsize=7, loc="upper left")
    by_dtype = [
        row
        for dtype in ("float16", "float32")
        for variant in ("ours", "flax")
        for row in rows_of(document, gpu="h200", dtype=dtype, devices=1, variant=variant)
    ]
    both = [f"{_LABELS[row['variant']]}\n{_DTYPES[row['dtype']]}" for row in by_dtype]
    _stack(panels[1], by_dtype, both, "bytes", _BYTES, 1e9)
    panels[1].set_title("GB, other dtypes", loc="left")
    _memory(panels[2], single)
    _stack(panels[3], variants, labels, "kernels", _BYTES, 1)
    panels[3].set_title("launches, bf16", loc="left")
    versions = document["environment"]["versions"]
    figure.suptitle(
        "COMPILED, not run: a training step of ResNet-50 on an H200, batch 256, without"
        f" convolutions; jax {versions['jax']}, flax {versions['flax']}",
        fontsize=9,
    )


def _stack(
    axes: Axes,
    rows: list[dict[str, Any]],
    labels: list[str],
    field: str,
    parts: tuple[tuple[str, tuple[str, ...], str], ...],
    unit: float,
) -> None:
    """A bar for each row, of parts of its `field`, with the sum above it."""
    below = [0.0] * len(rows)
    bars: Any = None
    for label, kinds, colour in parts:
        heights = [sum(row[field][kind] for kind in kinds) / unit for row in rows]
        bars = axes.bar(range(len(rows)), heights, bottom=below, color=colour, label=label)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.bar_label(bars, [f"{height:.0f}" for height in below], fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), labels, fontsize=7)


def _memory(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The planned peak of ours, with y recomputed or not, and of plain Flax."""
    dtypes = ("bfloat16", "float32")
    peaks = {(row["variant"], row["dtype"]): row["peak_bytes"] / 2**30 for row in rows}
    colours = {"ours_remat": theme.SKY, "ours": theme.BLUE, "flax": theme.ORANGE}
    for place, (variant, colour) in enumerate(colours.items()):
        left = [index + 0.28 * (place - 1) for index in range(len(dtypes))]
        heights = [peaks[variant, dtype] for dtype in dtypes]
        bars = axes.bar(left, heights, 0.28, color=colour, label=_LABELS[variant])
        theme.label_bars(axes, bars, "%.1f")
    axes.set_xticks(range(len(dtypes)), [_DTYPES[dtype] for dtype in dtypes], fontsize=7)
    axes.set_title("planned peak, GiB", loc="left")
    axes.margins(y=0.4)  # room for the legend
    axes.legend(fontsize=7, loc="upper left")
