"""scikit-learn's digits: 1797 real 8x8 images of handwritten digits, bundled with the package."""

import dataclasses
from typing import Any, Final

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from resnet50.data.pictures import Dataset

# Independent of the training's seed, so that every run is evaluated on the same held-out images.
SPLIT_SEED: Final = 0
HELD_OUT: Final = 360
_STEP: Final = 15  # pixels are integers from 0 to 16; 16 * 15 = 240


@dataclasses.dataclass(frozen=True)
class Digits:
    """One split, without augmentation."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return f"digit {index}"

    def for_training(self, index: int, generator: np.random.Generator) -> np.ndarray:
        del generator
        return self.images[index]

    def for_evaluation(self, index: int) -> np.ndarray:
        return self.images[index]


def load() -> Dataset:
    """Training and held-out digits, with the same class proportions in both."""
    digits: Any = load_digits()
    split: Any = train_test_split(
        (digits.images[..., None] * _STEP).astype(np.uint8),
        digits.target.astype(np.int32),
        test_size=HELD_OUT,
        random_state=SPLIT_SEED,
        stratify=digits.target,
    )
    images, held_out_images, labels, held_out_labels = split
    return Dataset(
        description="scikit-learn's 8x8 DIGITS (not ImageNet)",
        train=Digits(images, labels),
        val=Digits(held_out_images, held_out_labels),
        classes=tuple(str(digit) for digit in range(10)),
        image_shape=(8, 8, 1),
        mean=(float(images.mean()) / 255,),
        std=(float(images.std()) / 255,),
        fingerprint=f"digits-{len(labels)}",
    )
