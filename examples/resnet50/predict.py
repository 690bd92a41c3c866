"""Classifies pictures with a trained network.

python examples/resnet50/predict.py runs/resnet50 picture.jpg another.jpg
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Final

import jax
import numpy as np
import tyro
from resnet50 import devices, errors, runs
from resnet50.config import OptionalInt, Platform
from resnet50.data import decode
from resnet50.data.pictures import UnreadablePictureError
from rich.console import Console
from rich.table import Table
from rich.text import Text

# So many pictures are classified at once, which bounds the memory.
_BATCH: Final = 32


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print the most likely classes of each picture."""

    run: tyro.conf.Positional[pathlib.Path]
    """Output folder of train.py."""
    pictures: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    """The pictures, one or more; their centres are used, as in evaluation."""
    top: int = 5
    """Number of classes to print."""
    step: OptionalInt = None
    """Step of the checkpoint; the last one by default."""
    fold: bool = False
    """Fold BatchNorm into the convolutions, as export.py does."""
    platform: Platform = "auto"
    """Platform to run on."""


def main(arguments: Arguments) -> None:
    if not arguments.pictures:
        raise errors.UserError("no picture was named; name one or more after the folder of the run")
    if arguments.top < 1:
        raise errors.UserError(f"--top must be at least 1, got {arguments.top}.")
    devices.start(arguments.platform)
    trained = runs.load(arguments.run, arguments.step)
    if arguments.fold:
        trained = trained.folded()
    console = Console()
    for picture, probabilities in classified(trained, arguments.pictures):
        table = Table("class", "probability", title=Text(str(picture)), title_justify="left")
        for label in np.argsort(-probabilities, stable=True)[: arguments.top]:
            table.add_row(Text(trained.classes[label]), f"{probabilities[label]:.2%}")
        console.print(table)


def classified(
    trained: runs.Trained, pictures: tuple[pathlib.Path, ...]
) -> Iterator[tuple[pathlib.Path, np.ndarray]]:
    """Each picture with the probabilities of the classes, in batches of one size."""
    logits_function = jax.jit(trained.logits_function())
    batch = min(len(pictures), _BATCH)
    for start in range(0, len(pictures), batch):
        chosen = pictures[start : start + batch]
        images = np.stack([read(picture, trained.image_shape) for picture in chosen])
        # The last batch is filled up, so that only one program is compiled.
        images = np.pad(images, [(0, batch - len(chosen)), *[(0, 0)] * 3], mode="edge")
        probabilities = np.asarray(jax.nn.softmax(logits_function(trained.variables, images)))
        yield from zip(chosen, probabilities, strict=False)


def read(picture: pathlib.Path, shape: tuple[int, int, int]) -> np.ndarray:
    """The centre of a picture, uint8, in the shape that the network takes."""
    size, _, channels = shape
    try:
        image = decode.centre_crop(picture, size)
    except UnreadablePictureError as error:
        raise errors.UserError(f"{error}.") from error
    return image.mean(axis=-1, keepdims=True).astype(np.uint8) if channels == 1 else image


if __name__ == "__main__":
    sys.exit(errors.run(lambda: main(tyro.cli(Arguments))))
