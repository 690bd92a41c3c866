"""scikit-learn's digits: 1797 real 8x8 images of handwritten digits, bundled with the package."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASSES: Final = 10
# Independent of the training's seed, so that every run is evaluated on the same held-out images.
SPLIT_SEED: Final = 0
HELD_OUT: Final = 360
_WHITE: Final = 16  # pixels are integers from 0 to 16


class Digits(NamedTuple):
    """Images (N, 8, 8, 1) of mean 0 and standard deviation 1, float32; labels (N,), int32."""

    images: np.ndarray
    labels: np.ndarray


def load() -> tuple[Digits, Digits]:
    """Training and held-out digits, with the same class proportions in both."""
    digits: Any = load_digits()
    split: Any = train_test_split(
        digits.images[..., None].astype(np.float32) / _WHITE,
        digits.target.astype(np.int32),
        test_size=HELD_OUT,
        random_state=SPLIT_SEED,
        stratify=digits.target,
    )
    images, held_out_images, labels, held_out_labels = split
    mean, std = images.mean(), images.std()
    return (
        Digits((images - mean) / std, labels),
        Digits((held_out_images - mean) / std, held_out_labels),
    )


def batches(digits: Digits, size: int, generator: np.random.Generator) -> Iterator[Digits]:
    """One epoch in random order; an incomplete last batch is dropped."""
    order = generator.permutation(len(digits.labels))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield Digits(digits.images[chosen], digits.labels[chosen])
