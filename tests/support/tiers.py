"""Which parameters of a test belong to which tier of tests."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import pytest


def slow_except(first: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values as parameters; those that are not in `first` are left to `make check`."""
    return [
        pytest.param(value, id=str(value), marks=() if value in first else pytest.mark.slow)
        for value in values
    ]


def leave_combinations_to_slow(items: Iterable[pytest.Item]) -> None:
    """Marks a test as slow with combinations of parameters that `pairwise` does not choose."""
    tests: dict[Any, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in tests.values():
        chosen = pairwise([item.callspec.params for item in of_one_test])
        for i, item in enumerate(of_one_test):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)


def pairwise(combinations: Sequence[Mapping[str, object]]) -> set[int]:
    """Which combinations of parameters suffice to contain every pair of values.

    Most mistakes show with one value or with two together (Kuhn, Wallace and Gallo, "Software fault
    interactions and implications for software testing", 2004). In turn, the combination with most
    new pairs is taken, of equal ones the first. A single parameter has no pairs, so all its values
    are chosen.
    """
    # Values may have no equality, such as arrays; all combinations hold the same objects.
    values = ([(name, id(each[name])) for name in sorted(each)] for each in combinations)
    pairs = [set(itertools.combinations(of_one, min(2, len(of_one)))) for of_one in values]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
