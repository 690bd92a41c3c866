"""What every source of pictures offers."""

import dataclasses
from typing import Any, Protocol

import numpy as np


class UnreadablePictureError(Exception):
    """A picture that cannot be decoded; the text names it and says why."""


class Pictures(Protocol):
    """The labelled pictures of one split, by index."""

    def __len__(self) -> int: ...

    def label(self, index: int) -> int: ...

    def name(self, index: int) -> str:
        """For messages: the path, where there is one."""
        ...

    def for_training(self, index: int, generator: np.random.Generator) -> np.ndarray:
        """Augmented, uint8 (size, size, channels); raises UnreadablePictureError."""
        ...

    def for_evaluation(self, index: int) -> np.ndarray:
        """Always the same, uint8 (size, size, channels); raises UnreadablePictureError."""
        ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and held-out pictures, and what the network must know about them."""

    description: str
    """Stands in every log, so that nobody takes a number on digits or noise for ImageNet's."""
    train: Pictures
    val: Pictures
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of each channel, where white is 1."""
    fingerprint: str
    """Changes where other pictures, or the same in another order, stand behind the indices."""

    def to_json(self) -> dict[str, Any]:
        """What evaluation, prediction and export need without the training pictures."""
        return {
            "description": self.description,
            "classes": list(self.classes),
            "image_shape": list(self.image_shape),
            "mean": list(self.mean),
            "std": list(self.std),
        }
