"""Of a test's combinations of parameters, the faster tiers run so many that all values occur."""

import itertools
import subprocess
import sys
import types
from collections.abc import Callable, Iterable

import pytest
from checkout import ROOT
from tiers import covering, leave_combinations_to_slow

pytestmark = pytest.mark.one_python

PARAMETERS = {"dtype": "abcd", "form": "ef", "save": "gh", "layout": "ij", "axis": "kl"}
COMBINATIONS = [
    dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*PARAMETERS.values())
]


def test_every_value_is_chosen() -> None:
    chosen = [COMBINATIONS[i] for i in covering(COMBINATIONS, 1)]
    for name, values in PARAMETERS.items():
        assert {each[name] for each in chosen} == set(values)
    assert len(chosen) == 4


def test_every_pair_is_chosen() -> None:
    chosen = [COMBINATIONS[i] for i in covering(COMBINATIONS, 2)]
    for first, second in itertools.combinations(PARAMETERS, 2):
        pairs = {(each[first], each[second]) for each in chosen}
        assert pairs == set(itertools.product(PARAMETERS[first], PARAMETERS[second]))
    assert len(chosen) < len(COMBINATIONS) // 4


@pytest.mark.parametrize("strength", [1, 2])
def test_all_values_of_one_parameter(strength: int) -> None:
    assert len(covering([{"dtype": value} for value in "abcd"], strength)) == 4


def test_all_pairs_of_two_parameters() -> None:
    both = [{"a": a, "b": b} for a in "cd" for b in "efg"]
    assert len(covering(both, 2)) == 6
    assert len(covering(both, 1)) == 3


class _Item:
    """As much of `pytest.Item` as decides about its tier."""

    def __init__(self, test: str, marks: Iterable[str] = (), **params: str) -> None:
        self.nodeid = f"{test}[{'-'.join(params.values())}]"
        self.callspec = types.SimpleNamespace(params=params)
        self.marks = set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def _items(test: str, marks: Callable[..., Iterable[str]]) -> list[_Item]:
    return [
        _Item(test, marks(a, b, c), a=a, b=b, c=c)
        for a, b, c in itertools.product("xyz", "12", "+-")
    ]


def test_values_that_are_left_to_slow_tests() -> None:
    """A value with the mark is in slow tests alone, in each pair with another value."""
    items = _items("t", lambda a, b, c: ["slow"] if a == "z" else [])
    leave_combinations_to_slow(items)
    fast = [item.callspec.params for item in items if "slow" not in item.marks]
    assert {each["a"] for each in fast} == {"x", "y"}
    assert {value for each in fast for value in each.values()} == set("xy12+-")
    run = [item.callspec.params for item in items if "weekly" not in item.marks]
    for first, second in itertools.combinations("abc", 2):
        pairs = {(item.callspec.params[first], item.callspec.params[second]) for item in items}
        assert {(each[first], each[second]) for each in run} == pairs
    assert len(fast) < len(run) < len(items)


def test_a_test_that_is_slow_as_a_whole_keeps_all_combinations() -> None:
    items = _items("slow", lambda *_: ["slow"]) + _items("gpu", lambda *_: ["gpu"])
    before = [set(item.marks) for item in items]
    leave_combinations_to_slow(items)
    assert [item.marks for item in items] == before


def collected(folder: str, *options: str) -> set[str]:
    """The names of the tests that pytest would run."""
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only",
         *options, folder],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return {line for line in finished.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_the_rest_is_slow() -> None:
    """As pytest sees it: together the tiers have every combination once."""
    tests = "tests/operators/test_special_values.py"
    every, fast = collected(tests), collected(tests, "-m", "not slow")
    slow, pairs = collected(tests, "-m", "slow"), collected(tests, "-m", "slow and not weekly")
    assert fast
    assert slow
    assert not fast & slow
    assert fast | slow == every
    assert pairs
    assert pairs < slow
    assert {test.partition("[")[0] for test in fast} == {test.partition("[")[0] for test in every}


@pytest.mark.slow
def test_tests_for_a_gpu_are_in_no_tier_without_one() -> None:
    assert collected("tests/gpu/test_gpu.py", "-m", "gpu")
    assert not collected("tests/gpu/test_gpu.py", "-m", "slow or not gpu")
