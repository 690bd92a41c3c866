"""The interface of every source of pictures."""

import dataclasses
from typing import Any, Protocol

import numpy as np


class UnreadablePictureError(Exception):
    """A picture cannot be decoded; the text names it and says why."""


class Pictures(Protocol):
    """The labelled pictures of one split, by index."""

    def __len__(self) -> int: ...

    def label(self, index: int) -> int: ...

    def name(self, index: int) -> str:
        """The picture's name for messages: its path, if it has one."""
        ...

    def for_training(self, index: int, generator: np.random.Generator) -> np.ndarray:
        """The augmented picture, uint8 (size, size, channels); raises UnreadablePictureError."""
        ...

    def for_evaluation(self, index: int) -> np.ndarray:
        """Deterministic, uint8 (size, size, channels); raises UnreadablePictureError."""
        ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and held-out pictures, and what the network needs to know about them."""

    description: str
    """Printed in every log, so that nobody takes results on digits or noise for ImageNet's."""
    train: Pictures
    val: Pictures
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of each channel, on a scale where white is 1."""
    fingerprint: str
    """Differs if the indices refer to other pictures, or to the same ones in another order."""

    def to_json(self) -> dict[str, Any]:
        """What evaluation, prediction and export need without the training pictures."""
        return {
            "description": self.description,
            "classes": list(self.classes),
            "image_shape": list(self.image_shape),
            "mean": list(self.mean),
            "std": list(self.std),
        }
