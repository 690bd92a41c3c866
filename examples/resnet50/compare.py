"""Compares training curves and accuracy of fused and plain BatchNorm on the digits.

    python examples/resnet50/compare.py --output examples/resnet50/results/digits.json

Trains both networks from each seed, on the same pictures in the same order. They differ only by
rounding, but training amplifies the difference, rapidly once it turns a ReLU on or off. The curves
are therefore compared over the first epoch, and the final accuracy is averaged over the seeds.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any, Final, get_args

import flax
import jax
import numpy as np
import tyro
from matplotlib.figure import Figure
from resnet50 import config, errors, loop, metrics, model
from rich.console import Console
from rich.table import Table

NORMS: Final = get_args(config.Norm)
# Bounds on the difference between the losses in the first steps, and between the mean accuracies
# over the seeds (one of the 360 held-out digits is 0.0028).
EARLY_STEPS: Final = 22  # an epoch
LOSS_BOUND: Final = 1e-4
ACCURACY_BOUND: Final = 0.01


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train on the digits with fused and with plain BatchNorm, from several seeds."""

    output: pathlib.Path
    """JSON file for the results."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of the variables and of the order; the held-out digits are always the same."""
    epochs: float = 20.0
    """Epochs of each training run."""


def compare(seeds: tuple[int, ...], epochs: float, on: list[Any] | None = None) -> dict[str, Any]:
    """Curves, accuracies, and whether they are within the bounds."""
    runs = []
    for seed in seeds:
        trained: dict[str, Any] = {"seed": seed}
        for norm in NORMS:
            trained[norm] = _train(norm, seed, epochs, on)
            top1 = trained[norm]["top1"]
            print(f"seed {seed}, {model.describe_norm(norm)}: top-1 {top1:.2%}", flush=True)
        runs.append(trained)
    return {
        "settings": {"epochs": epochs, "preset": config.to_json(config.PRESETS["digits"][1])},
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": jax.devices()[0].device_kind,
        **summary(runs),
        "runs": runs,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The differences and their bounds."""
    # Unlike max(), it keeps a NaN.
    early = [float(np.max(differences(run)[:EARLY_STEPS])) for run in runs]
    accuracies = {norm: [run[norm]["top1"] for run in runs] for norm in NORMS}
    means = {norm: statistics.mean(values) for norm, values in accuracies.items()}
    mean_difference = means["fused"] - means["flax"]
    return {
        "early_steps": EARLY_STEPS,
        "largest_early_loss_difference": early,
        "loss_bound": LOSS_BOUND,
        "mean_top1": means,
        "stdev_top1": {norm: statistics.pstdev(values) for norm, values in accuracies.items()},
        "mean_top1_difference": mean_difference,
        "accuracy_bound": ACCURACY_BOUND,
        "passed": bool(np.max(early) <= LOSS_BOUND) and abs(mean_difference) <= ACCURACY_BOUND,
    }


def differences(run: dict[str, Any]) -> list[float]:
    """The differences between the losses, step by step."""
    curves = (run[norm]["losses"] for norm in NORMS)
    return [abs(a - b) for a, b in zip(*curves, strict=True)]


def draw(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """The losses of the first seed, and how far the two networks are apart, for every seed."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for norm, style in zip(NORMS, ("-", "--"), strict=True):
        left.plot(runs[0][norm]["losses"], style, label=norm)
    left.set(xlabel="step", ylabel="loss", title=f"seed {runs[0]['seed']}")
    left.legend(frameon=False)
    for run in runs:
        right.plot(differences(run), label=f"seed {run['seed']}")
    right.hlines(LOSS_BOUND, 0, EARLY_STEPS, color="black", label="bound")
    right.set(xlabel="step", ylabel="difference of the losses", yscale="log")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _train(norm: config.Norm, seed: int, epochs: float, on: list[Any] | None) -> dict[str, Any]:
    preset = config.PRESETS["digits"][1]
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder)
        options = dataclasses.replace(
            preset,
            model=dataclasses.replace(preset.model, norm=norm),
            training=dataclasses.replace(
                preset.training,
                seed=seed,
                epochs=epochs,
                warmup_epochs=min(preset.training.warmup_epochs, epochs / 2),
            ),
            run=dataclasses.replace(
                preset.run,
                output=output,
                log_every=1,
                evaluate_every=epochs,
                checkpoint_every=10**9,
            ),
        )
        result = loop.train(options, Console(quiet=True), on)["network"]
        lines = metrics.read(output / "metrics.jsonl")
    losses = [round(line["loss"], 7) for line in lines if line["kind"] == "train"]
    return {"top1": result.top1, "top5": result.top5, "val_loss": result.loss, "losses": losses}


def main(arguments: Arguments) -> None:
    results = compare(arguments.seeds, arguments.epochs)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results) + "\n")
    picture = arguments.output.with_suffix(".png")
    draw(results["runs"], picture)
    table = Table("seed", "early loss difference", *(f"top-1 {norm}" for norm in NORMS))
    for run, difference in zip(
        results["runs"], results["largest_early_loss_difference"], strict=True
    ):
        table.add_row(
            str(run["seed"]), f"{difference:.1e}", *(f"{run[norm]['top1']:.2%}" for norm in NORMS)
        )
    table.add_row("mean", "", *(f"{results['mean_top1'][norm]:.2%}" for norm in NORMS))
    Console().print(table)
    print(f"wrote {arguments.output} and {picture}")
    if not results["passed"]:
        raise errors.UserError(
            f"fused and plain differ by more than {LOSS_BOUND:g} (loss) or {ACCURACY_BOUND:g}"
            " (accuracy)."
        )


if __name__ == "__main__":
    sys.exit(errors.run(lambda: main(tyro.cli(Arguments))))
