"""Classifies one picture with a trained network.

python examples/resnet50/predict.py runs/resnet50 picture.jpg
"""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import tyro
from resnet50 import devices, errors, runs
from resnet50.config import OptionalInt, Platform
from resnet50.data import decode
from resnet50.data.pictures import UnreadablePictureError
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print the most likely classes of one picture."""

    run: tyro.conf.Positional[pathlib.Path]
    """Output folder of train.py."""
    picture: tyro.conf.Positional[pathlib.Path]
    """The picture; its centre is used, as in evaluation."""
    top: int = 5
    """Number of classes to print."""
    step: OptionalInt = None
    """Step of the checkpoint; the last one by default."""
    fold: bool = False
    """Fold BatchNorm into the convolutions, as export.py does."""
    platform: Platform = "auto"
    """Platform to run on."""


def main(arguments: Arguments) -> None:
    devices.start(arguments.platform)
    trained = runs.load(arguments.run, arguments.step)
    if arguments.fold:
        trained = trained.folded()
    size, _, channels = trained.image_shape
    try:
        image = decode.centre_crop(arguments.picture, size)
    except UnreadablePictureError as error:
        raise errors.UserError(f"{error}.") from error
    if channels == 1:
        image = image.mean(axis=-1, keepdims=True).astype(np.uint8)
    logits = jax.jit(trained.logits_function())(trained.variables, image[None])
    probabilities = np.asarray(jax.nn.softmax(logits[0]))
    table = Table("class", "probability")
    for label in np.argsort(-probabilities, stable=True)[: arguments.top]:
        table.add_row(trained.classes[label], f"{probabilities[label]:.2%}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(errors.run(lambda: main(tyro.cli(Arguments))))
