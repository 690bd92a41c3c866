"""Noise with random labels, to measure the speed of training without the cost of pictures."""

import dataclasses
import functools
from typing import Final

import numpy as np

from resnet50.data.pictures import Dataset

_DISTINCT: Final = 64
_VALIDATION: Final = 1024


@dataclasses.dataclass(frozen=True)
class Noise:
    """`length` pictures, only a few of them distinct, so that they cost nothing to generate."""

    length: int
    size: int
    classes: int
    seed: int

    @functools.cached_property
    def _pool(self) -> np.ndarray:
        shape = (_DISTINCT, self.size, self.size, 3)
        return np.random.default_rng(self.seed).integers(0, 256, shape, np.uint8)

    def __len__(self) -> int:
        return self.length

    def label(self, index: int) -> int:
        return int(np.random.default_rng((self.seed, index % _DISTINCT)).integers(self.classes))

    def name(self, index: int) -> str:
        return f"synthetic picture {index}"

    def for_training(self, index: int, generator: np.random.Generator) -> np.ndarray:
        del generator
        return self._pool[index % _DISTINCT]

    def for_evaluation(self, index: int) -> np.ndarray:
        return self._pool[index % _DISTINCT]


def make(length: int, size: int, classes: int) -> Dataset:
    return Dataset(
        description="SYNTHETIC noise with random labels (accuracy means nothing)",
        train=Noise(length, size, classes, seed=1),
        val=Noise(min(length, _VALIDATION), size, classes, seed=2),
        classes=tuple(str(label) for label in range(classes)),
        image_shape=(size, size, 3),
        mean=(0.5,) * 3,
        std=(0.29,) * 3,
        fingerprint=f"synthetic-{length}-{classes}",
    )
