"""Data whose mean and variance are exact in any order of summation, as in oneDNN's benchdnn.

Values come in pairs mean - d, mean + d (with an odd count, one value is the mean itself). Each d is
a small multiple of a grain, so that every partial sum of values, and of squares around any element,
is a whole number of grains that the accumulation dtype can represent. If a channel is too long for
that, the mean is 0 and so are most values.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from cases import as_dtype
from oracle import Array


class ExactFill(NamedTuple):
    x: Array  # (count, channels)
    mean: Array
    var: Array


def exact_fill(count: int, channels: int, dtype: str, seed: int = 0) -> ExactFill:
    random = np.random.default_rng(seed)
    accumulation = np.float64 if dtype == "float64" else np.float32
    digits = np.finfo(accumulation).nmant + 1
    # Values are up to 2*spread grains away from any element, and their squares sum below 2^digits.
    spread = int(np.sqrt(2.0**digits / count) / 2)
    stored_digits = ml_dtypes.finfo(np.dtype(dtype)).nmant + 1
    spread = min(spread, 2 ** (stored_digits - 3) - 1, 1023)
    half = count // 2
    if spread >= 1:
        mean = 0.25 * 2.0 ** (np.arange(channels) % 7)
        grain = mean * 2.0 ** -np.ceil(np.log2(spread + 1))
        grains = random.integers(0, spread + 1, (half, channels))
    else:
        mean, grain = np.zeros(channels), 2.0 ** (np.arange(channels) % 7)
        grains = (random.random((half, channels)) < 2.0 ** (digits - 3) / count).astype(np.int64)
    centre = np.zeros((count - 2 * half, channels), np.int64)
    signed = random.permuted(np.concatenate([grains, -grains, centre]), axis=0)
    x = mean + grain * signed
    stored = as_dtype(x, dtype)
    assert (stored.astype(np.float64) == x).all(), "the fill does not fit the dtype"
    # Integers and one division give the exact quotient, rounded once.
    squares = (signed**2).sum(axis=0)
    var = grain.astype(np.longdouble) ** 2 * squares.astype(np.longdouble) / count
    return ExactFill(stored, mean.astype(accumulation), var.astype(accumulation))


def arrange(columns: Array, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Any, int]:
    """Rearranges (count, C) to (*before, C, *after), and returns it with the channel axis."""
    channels = columns.shape[1]
    return np.moveaxis(columns.reshape(*before, *after, channels), -1, len(before)), len(before)
