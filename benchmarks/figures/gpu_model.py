"""A figure of what the CUDA kernels should take, according to the model: nothing is measured."""

from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import theme

# The share of the predicted time that the copy of every array should take, by (batch, dtype, save).
# That is 1 / 1.6 at batch 32, where launches and waiting for sums weigh more.
GOALS: Final = {
    (256, "bfloat16", "mask"): 0.80,
    (256, "float16", "mask"): 0.80,
    (256, "float32", "mask"): 0.75,
    (32, "bfloat16", "mask"): 1 / 1.6,
}
_DTYPES: Final = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_PARTS: Final = (
    ("every array once, at the rate of a copy", theme.BLUE),
    ("read again, masks", theme.SKY),
    ("streaming slower than a copy", theme.GREY),
    ("waiting for sums", theme.ORANGE),
    ("launches", theme.PINK),
)


def parts_of(direction: dict[str, Any], bytes_per_us: float) -> tuple[float, ...]:
    """The microseconds of a direction, by _PARTS; they add up to `predicted_us`."""
    copy = direction["bytes"] / bytes_per_us
    return (
        direction["floor_us"],
        copy - direction["floor_us"],
        direction["streaming_us"] - copy,
        direction["waiting_us"],
        direction["launching_us"],
    )


def draw(figure: Figure, document: dict[str, Any]) -> None:
    """Draws the milliseconds of a step by site (left), and the shares of the floor (right)."""
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    run = document["runs"][0]
    _sites(left, run)
    _shares(right, document["runs"])
    figure.suptitle(
        f"MODELLED, not measured: the 53 BatchNorm sites of ResNet-50 on an {run['device']},"
        " forward + backward",
        fontsize=9,
    )


def _sites(axes: Axes, run: dict[str, Any]) -> None:
    rate = run["copy_bytes_per_us"]
    sites = sorted(run["sites"], key=lambda site: site["count"] * site["predicted_us"])
    times_of_sites = [
        [
            site["count"] * (forward + backward) / 1e3
            for forward, backward in zip(
                parts_of(site["forward"], rate), parts_of(site["backward"], rate), strict=True
            )
        ]
        for site in sites
    ]
    before = [0.0] * len(sites)
    for index, (label, colour) in enumerate(_PARTS):
        widths = [parts[index] for parts in times_of_sites]
        axes.barh(range(len(sites)), widths, left=before, color=colour, label=label)
        before = [a + b for a, b in zip(before, widths, strict=True)]
    for place, (site, end) in enumerate(zip(sites, before, strict=True)):
        axes.text(end, place, f" {site['floor_share']:.0%}", va="center", fontsize=7)
    axes.plot(
        [site["count"] * site["flax"]["predicted_us"] / 1e3 for site in sites],
        range(len(sites)),
        "|",
        color=theme.VERMILLION,
        markersize=10,
        markeredgewidth=2,
        label="plain Flax at least, by its compiled program",
    )
    labels = [f"{site['count']} x {_label(site['site'])}" for site in sites]
    axes.set_yticks(range(len(sites)), labels, fontsize=8)
    axes.set_xlabel("ms of all occurrences; share of the floor")
    axes.set_title(
        f'{run["dtype"]}, batch {run["batch"]}, save="{run["save"]}": {run["sum_ms"]:.1f} ms,'
        f" floor {run['floor_ms']:.1f}, plain Flax at least {run['flax_ms']:.1f}",
        loc="left",
    )
    axes.legend(fontsize=8, loc="lower right")


def _label(site: str) -> str:
    size, form = site.split(" ")
    return f"{size} {' '.join(word for word in form.split('_') if word in ('add', 'relu'))}"


def _shares(axes: Axes, runs: list[dict[str, Any]]) -> None:
    shares = [run["floor_share"] for run in runs]
    bars = axes.bar(range(len(runs)), shares, color=theme.BLUE)
    labels = [f"{run['sum_ms']:.1f}\nms\n{run['floor_share']:.0%}" for run in runs]
    axes.bar_label(bars, labels, fontsize=7, label_type="center", color="white")
    marked = False
    for place, run in enumerate(runs):
        goal = GOALS.get((run["batch"], run["dtype"], run["save"]))
        if goal is not None:
            label = "_" if marked else "goal"
            axes.hlines(goal, place - 0.4, place + 0.4, color=theme.ORANGE, label=label)
            marked = True
    names = [f"{_DTYPES[run['dtype']]}\n{run['batch']}\n{run['save']}" for run in runs]
    axes.set_xticks(range(len(runs)), names, fontsize=7)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("dtype, batch, save")
    axes.set_title("share of the floor", loc="left")
    axes.legend(fontsize=8, loc="upper left")
