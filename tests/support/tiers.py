"""Which parameters of a test belong to which tier of tests."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import pytest

# Tests with one of these marks are in no tier that leaves combinations to a slower one.
_IN_NO_TIER = ("large", "gpu")
_LONG_FILES = frozenset(
    f"test_{name}.py" for name in ("native", "cuda_mutations", "emulated_cuda", "cpu_instructions")
)


def slow_except(first: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values as parameters; those that are not in `first` are left to `make check`."""
    return [
        pytest.param(value, id=str(value), marks=() if value in first else pytest.mark.slow)
        for value in values
    ]


def leave_combinations_to_slow(items: Iterable[Any]) -> None:
    """Marks a test as slow with combinations of parameters that contain no new value.

    Those that contain no new pair of values either are also marked as `weekly`. A test that is
    slow with all its parameters keeps all combinations, and so do tests that need a GPU or much
    memory, which stay outside these tiers.
    """
    tests: dict[str, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, _IN_NO_TIER)):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in tests.values():
        fast = [item for item in of_one_test if not item.get_closest_marker("slow")]
        if not fast:
            continue
        chosen = _choose(fast, 1)
        for item in fast:
            if item not in chosen:
                item.add_marker(pytest.mark.slow)
        pairs = _choose(of_one_test, 2)
        for item in of_one_test:
            if item not in chosen and item not in pairs:
                item.add_marker(pytest.mark.weekly)


def long_files_first(items: list[Any]) -> None:
    """Moves what compiles for minutes to the front.

    At the end there would be nothing else to do beside it.
    """
    items.sort(key=lambda item: item.path.name not in _LONG_FILES)


def _choose(items: Sequence[Any], strength: int) -> set[Any]:
    return {items[i] for i in covering([item.callspec.params for item in items], strength)}


def covering(combinations: Sequence[Mapping[str, object]], strength: int) -> set[int]:
    """Which combinations of parameters suffice to contain every value, or every pair of values.

    Most mistakes show with one value or with two together (Kuhn, Wallace and Gallo, "Software fault
    interactions and implications for software testing", 2004). In turn, the combination with most
    new values or pairs is taken, of equal ones the first. A single parameter has no pairs, so all
    its values are chosen.

    Args:
        combinations: the values of the parameters by name, for each combination.
        strength: 1 for values, 2 for pairs of values.
    """
    # Values may have no equality, such as arrays; all combinations hold the same objects.
    values = ([(name, id(each[name])) for name in sorted(each)] for each in combinations)
    parts = [set(itertools.combinations(of_one, min(strength, len(of_one)))) for of_one in values]
    missing = set().union(*parts)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(parts)), key=lambda i: len(parts[i] & missing))
        chosen.add(best)
        missing -= parts[best]
    return chosen
