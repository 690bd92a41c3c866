"""Of a test's combinations of parameters, the faster tiers run so many that all pairs occur."""

import itertools
import subprocess
import sys

import pytest
from checkout import ROOT
from tiers import pairwise

pytestmark = pytest.mark.one_python

PARAMETERS = {"dtype": "abcd", "form": "ef", "save": "gh", "layout": "ij", "axis": "kl"}
COMBINATIONS = [
    dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*PARAMETERS.values())
]


def test_every_pair_is_chosen() -> None:
    chosen = [COMBINATIONS[i] for i in pairwise(COMBINATIONS)]
    for first, second in itertools.combinations(PARAMETERS, 2):
        pairs = {(each[first], each[second]) for each in chosen}
        assert pairs == set(itertools.product(PARAMETERS[first], PARAMETERS[second]))
    assert len(chosen) < len(COMBINATIONS) // 4


def test_all_values_of_one_parameter_and_all_pairs_of_two() -> None:
    assert len(pairwise([{"dtype": value} for value in "abcd"])) == 4
    assert len(pairwise([{"a": a, "b": b} for a in "cd" for b in "efg"])) == 6


def test_the_rest_is_slow() -> None:
    """As pytest sees it: together the tiers have every combination once."""

    def collected(*options: str) -> set[str]:
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only",
             *options, "tests/operators/test_special_values.py"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return {line for line in finished.stdout.splitlines() if "::" in line}

    every, fast, slow = collected(), collected("-m", "not slow"), collected("-m", "slow")
    assert fast
    assert slow
    assert not fast & slow
    assert fast | slow == every
    assert {test.partition("[")[0] for test in fast} == {test.partition("[")[0] for test in every}
