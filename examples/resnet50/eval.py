"""Evaluates a trained network on the held-out pictures.

python examples/resnet50/eval.py runs/resnet50
"""

import dataclasses
import json
import pathlib
import sys

import tyro
from resnet50 import accuracy, devices, errors, model, recipe_checks, runs
from resnet50.config import OptionalBool, OptionalInt, OptionalNorm, OptionalPath, Platform
from resnet50.data import pipeline, sources
from resnet50.display import Display
from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Evaluate a trained network on the held-out pictures."""

    run: tyro.conf.Positional[pathlib.Path]
    """Output folder of train.py."""
    step: OptionalInt = None
    """Step of the checkpoint; the last one by default."""
    average: OptionalBool = None
    """Evaluate the moving average of the variables; by default if there is one."""
    norm: OptionalNorm = None
    """Use another BatchNorm than in training."""
    fold: bool = False
    """Fold BatchNorm into the convolutions, as export.py does."""
    images: OptionalPath = None
    """Folder with other pictures, in train/<class> and val/<class>, of the same classes."""
    batch_size: int = 256
    """Pictures per batch."""
    workers: OptionalInt = None
    """Processes that decode pictures; by default as many as train.py uses."""
    platform: Platform = "auto"
    """Platform to run on."""
    json: OptionalPath = None
    """JSON file for the result."""


def main(arguments: Arguments) -> None:
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise errors.UserError(f"the folder of --json {arguments.json} does not exist.")
    if arguments.json is not None and arguments.json.is_dir():
        raise errors.UserError(f"--json {arguments.json} is a folder; name a file in it.")
    if arguments.workers is not None and arguments.workers < 0:
        raise errors.UserError(f"--workers must be at least 0, got {arguments.workers}.")
    display = Display(Console())
    mesh = devices.data_mesh(devices.start(arguments.platform))
    devices.check_batch(arguments.batch_size, 1, mesh)
    trained = runs.load(arguments.run, arguments.step, arguments.norm, arguments.average)
    if arguments.fold:
        trained = trained.folded()
    options = trained.data
    recipe_checks.check_images(trained.source, arguments.images)
    if arguments.images is not None:
        options = dataclasses.replace(options, images=arguments.images)
    dataset = sources.open_source(trained.source, options)
    if dataset.classes != trained.classes:
        raise errors.UserError(
            f"{dataset.description}: {len(dataset.classes)} classes that are not the"
            f" {len(trained.classes)} of the network; classes are the names of the folders, and"
            " must be those of the training."
        )

    def report(batch: pipeline.Batch) -> None:
        for index in batch["unreadable"][batch["unreadable"] >= 0]:
            name = dataset.val.name(int(index))
            display.unreadable(name, "it is left out")

    workers = arguments.workers
    results = accuracy.evaluate(
        accuracy.compiled(trained.logits_function(), mesh),
        {"network": trained.variables},
        pipeline.evaluation_batches(
            dataset,
            arguments.batch_size,
            pipeline.default_workers(trained.source) if workers is None else workers,
        ),
        mesh,
        report,
    )
    assert results is not None  # it returns None only if a `stopped` function is given
    result = results["network"]
    if not result.images:
        raise errors.UserError(f"{dataset.description}: none of the held-out pictures is readable.")
    display.say(
        f"step {trained.step}: {result.text(len(trained.classes))}; {dataset.description};"
        f" {model.describe_norm(trained.model.norm)}{', folded' if arguments.fold else ''}"
    )
    if arguments.json is not None:
        values = {**dataclasses.asdict(result), "step": trained.step, "norm": trained.model.norm}
        values["folded"], values["pictures"] = arguments.fold, dataset.description
        arguments.json.write_text(json.dumps(values, indent=1) + "\n")
        display.say(f"wrote {arguments.json}")


if __name__ == "__main__":
    sys.exit(errors.run(lambda: main(tyro.cli(Arguments))))
