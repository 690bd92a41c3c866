"""Which parameters of a test belong to which tier of tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(first: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values as parameters; those that are not in `first` are left to `make check`."""
    return [
        pytest.param(value, id=str(value), marks=() if value in first else pytest.mark.slow)
        for value in values
    ]
