"""Peers must compute the same before their times count."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def check_agree(first: Iterable[Any], second: Iterable[Any], tolerance: float) -> None:
    """Compares arrays by the norm of their difference, relative to the norm of those of `first`.

    Raises:
        AssertionError: a pair differs by more, or holds a NaN.
    """
    for a, b in zip(first, second, strict=True):
        distance = np.linalg.norm(a - b) / np.linalg.norm(a)
        if not distance < tolerance:
            raise AssertionError(f"results differ by {distance:.1e} of their norm")
