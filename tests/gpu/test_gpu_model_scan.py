"""The scan of shapes: every strategy that the planner has wins somewhere, or is needed."""

from typing import Any

import pytest

for _package in ("flax", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.gpu.model import scan  # noqa: E402
from benchmarks.gpu.model.devices import DEVICES  # noqa: E402

pytestmark = pytest.mark.one_python


def wins(rows: list[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = dict.fromkeys(scan.STRATEGIES, 0)
    for row in rows:
        total[row["strategy"]] += row["wins"]
    return total


def test_a_strategy_that_wins_nowhere_would_show() -> None:
    found = scan.scan(DEVICES["h200"], {})
    assert wins(found)["cluster"] > 0
    assert wins(found)["on_chip"] > 0
    # What waits for ever wins nothing, except in blocks that are teams of their own.
    without = scan.scan(DEVICES["h200"], {"barrier": 1e9})
    assert wins(without)["on_chip"] < wins(found)["on_chip"] / 2
    # Two kernels never wait. They are also what is left where blocks cannot wait, and for float64.
    assert wins(without)["two_kernels"] > 0
    assert all(row["gain"] is None or row["gain"] >= 1 for row in found + without)


def test_a_device_without_clusters_has_no_clusters() -> None:
    assert wins(scan.scan(DEVICES["a100"], {}))["cluster"] == 0


def test_every_shape_has_a_winner(capsys: pytest.CaptureFixture[str]) -> None:
    rows = scan.main(["--device", "l4"])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    for dtype in scan.DTYPES:
        for direction in ("forward", "backward"):
            of_both = [r for r in rows if (r["dtype"], r["direction"]) == (dtype, direction)]
            assert sum(row["wins"] for row in of_both) >= of_both[0]["shapes"]


def test_bad_constants() -> None:
    with pytest.raises(SystemExit, match="barier is none of the constants"):
        scan.main(["--constants", "barier=1"])
