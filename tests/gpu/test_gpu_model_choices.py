"""The comparison of the planner's choices with plans that were timed on an H200."""

import copy
import json
from typing import Any

import pytest

for _package in ("flax", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.gpu.model import choices  # noqa: E402

pytestmark = pytest.mark.one_python


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return json.loads(choices.MEASURED.read_text())


def test_choices_lose_little(measured: dict[str, Any]) -> None:
    """What docs/performance.md says."""
    found = choices.compare(measured, {})
    assert list(found["batches"]) == [256, 64, 32]
    assert all(one["cases"] == 24 for one in found["batches"].values())
    assert [one["unmeasured"] for one in found["batches"].values()] == [0, 2, 4]
    assert all(0 <= one["lost"] < 0.007 for one in found["batches"].values())
    errors = {name: one["error"] for name, one in found["strategies"].items()}
    assert errors == {
        "cluster": pytest.approx(0.12, abs=0.01),
        "on_chip": pytest.approx(0.055, abs=0.005),
        "two_kernels": pytest.approx(0.143, abs=0.005),
    }


def test_bad_choices_show(measured: dict[str, Any]) -> None:
    """If waiting cost nothing, the planner would let small teams wait often."""
    careless = choices.compare(measured, {"barrier": 0.0, "barrier_of_column": 0.0, "skew": 0.0})
    assert careless["batches"][256]["lost"] > 0.02
    assert careless["strategies"]["on_chip"]["error"] > 0.1


def test_a_plan_that_was_not_timed_is_counted(measured: dict[str, Any]) -> None:
    changed = copy.deepcopy(measured)
    for row in changed["rows"]:
        if row["batch"] == 256 and row["direction"] == "forward":
            row["team"] += 1
    found = choices.compare(changed, {})
    assert found["batches"][256]["unmeasured"] == 12
    assert found["batches"][64] == choices.compare(measured, {})["batches"][64]


def test_the_sums_alone_do_not_count(measured: dict[str, Any]) -> None:
    sums = measured["rows"][0] | {"direction": "statistics", "us": 1.0}
    more = measured | {"rows": [*measured["rows"], sums]}
    assert choices.compare(more, {}) == choices.compare(measured, {})


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = choices.main([])
    printed = capsys.readouterr().out
    assert f"{found['batches'][256]['lost']:.1%}" in printed
    assert "on_chip: the model is off by 6% at" in printed
    choices.main(["--json"])
    assert json.loads(capsys.readouterr().out)["strategies"] == found["strategies"]
    with pytest.raises(SystemExit, match="none of the constants"):
        choices.main(["--constants", "barier=1"])
