"""What a finished run leaves for its reader: the picture of its curves, and what to do next."""

import pathlib
import shlex
from typing import Any, Final

from matplotlib.figure import Figure

from resnet50 import metrics, model
from resnet50.config import Config

# matplotlib's own colours, which most eyes can tell apart.
_COLOURS: Final = {"train": "C0", "val_network": "C1", "val_average": "C2"}
_LABELS: Final = {
    "train": "training",
    "val_network": "held out",
    "val_average": "held out, EMA",
}


def curve(lines: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Draws loss and top-1 accuracy of the lines of metrics.jsonl, training and held out."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, quantity, name in zip(panels, ("loss", "top1"), ("loss", "top-1 %"), strict=True):
        for kind, colour in _COLOURS.items():
            points = [(line["step"], line[quantity]) for line in lines if line["kind"] == kind]
            if points:
                steps, values = zip(*points, strict=True)
                factor = 100 if quantity == "top1" else 1
                axes.plot(
                    steps,
                    [factor * value for value in values],
                    color=colour,
                    label=_LABELS[kind],
                    marker="" if kind == "train" else "o",
                )
        axes.set(xlabel="step", ylabel=name)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.has_data():
            axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def mean_speed(lines: list[dict[str, Any]]) -> float | None:
    """Images per second over the whole run, without compilation, evaluation and checkpoints."""
    pairs = []
    previous = 0
    for line in lines:
        if line["kind"] == "train":
            if line.get("images_per_second"):
                pairs.append((line["step"] - previous, line["images_per_second"]))
            previous = line["step"]
    if not pairs:
        return None
    # All steps have the same number of pictures, so the mean speed is that of the summed times.
    return sum(steps for steps, _ in pairs) / sum(steps / speed for steps, speed in pairs)


def next_commands(config: Config) -> list[str]:
    """Command lines for what to do with a finished run; a network trained on noise is of no use."""
    run, programs = config.run.output, pathlib.Path(__file__).parents[1]
    if programs.is_relative_to(pathlib.Path.cwd()):
        programs = programs.relative_to(pathlib.Path.cwd())

    def command(program: str, *arguments: str) -> str:
        return shlex.join(["python", str(programs / program), str(run), *arguments])

    look = shlex.join(["tensorboard", "--logdir", str(run / "tensorboard")])
    look += "  # pip install tensorboard"
    if config.source == "synthetic":
        return [look]
    return [
        command("eval.py"),
        command("predict.py", "PICTURE.jpg"),
        command("export.py", str(run / "network.jax")),
        look,
    ]


def report(config: Config, path: pathlib.Path) -> list[str]:
    """Draws curve.png next to metrics.jsonl, and returns the lines that end the run."""
    lines = metrics.read(path)
    found = []
    speed = mean_speed(lines)
    if speed is not None:
        found.append(f"mean speed: {speed:.1f} images/s")
    picture = path.with_name("curve.png")
    try:
        curve(lines, f"{config.source}, {model.describe_norm(config.model.norm)}", picture)
        found.append(f"wrote {picture}, {path} and {path.with_name('checkpoints')}")
    except OSError as error:
        found.append(f"{picture} cannot be written ({error.strerror})")
    return [*found, "next:", *(f"  {line}" for line in next_commands(config))]
