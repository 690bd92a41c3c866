"""The results of a GPU that are committed, what the documentation says of them, and `keep`."""

import json
import re
from typing import Any

import pytest
from checkout import ROOT

for _package in ("matplotlib", "rich"):
    pytest.importorskip(_package)

from benchmarks.gpu import keep  # noqa: E402
from benchmarks.gpu.table import results_of  # noqa: E402

pytestmark = pytest.mark.one_python

RESULTS = ROOT / "benchmarks/results/gpu-h200.json"


def document() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def step(name: str, status: str, result: Any) -> dict[str, Any]:
    command = {"argv": ["python"], "result": result, "log": "x.log"}
    return {"name": name, "status": status, "seconds": 1.0, "commands": [command]}


def summary(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"dry_run": False, "steps": list(steps)}


def test_the_committed_results_are_those_of_a_whole_run() -> None:
    results = document()
    assert not results["dry_run"]
    statuses = {one["name"]: one["status"] for one in results["steps"]}
    assert set(statuses.values()) == {"passed"}
    assert {"smoke", "tests", "programs", "sanitize", "large", "sites_jax"} <= set(statuses)
    assert not re.search(r'"/\w', RESULTS.read_text()), "a path"
    devices = {
        result["device"]["kind"]
        for result in results_of(results)
        if "kind" in result.get("device", {})
    }
    assert devices == {"NVIDIA H200"}


def test_the_table_in_the_documentation_is_that_of_the_results() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    missing = [line for line in keep.markdown(document(), 256, "bfloat16") if line not in text]
    assert not missing, "\n".join(["docs/performance.md lacks:", *missing])


def test_what_was_not_measured_is_no_number_in_the_documentation() -> None:
    results = document()
    for one in results["steps"]:
        for command in one["commands"]:
            if (command["result"] or {}).get("family") == "torch":
                rows = command["result"]["rows"]
                rows[:] = [row for row in rows if (row["peer"], row["count"]) != ("cudnn", 11)]
    results = keep.keep([results])
    lines = list(keep.markdown(results, 256, "bfloat16"))
    assert [line for line in lines if "| - |" in line] == [
        line for line in lines if line.startswith(("| 14x14x256 bn_relu", "| sum"))
    ]
    with pytest.raises(SystemExit, match="128 bfloat16 was not measured; what was: 256 bfloat16;"):
        list(keep.markdown(results, 128, "bfloat16"))


def test_no_peer_is_faster_at_any_site_in_16_bits() -> None:
    """What the README says."""
    groups = [group for group in document()["table"] if group["dtype"] != "float32"]
    assert len(groups) == 6
    for group in groups:
        assert group["sites"] == 16
        assert all(not sites["ours"] for sites in group["slower_than"].values()), group["batch"]


def test_a_step_comes_from_the_last_run_in_which_it_passed() -> None:
    first = summary(step("smoke", "passed", {"run": 1}), step("micro", "passed", {"run": 1}))
    second = summary(
        step("smoke", "passed", {"run": 2}),
        step("micro", "failed", {"run": 2}),
        step("doctor", "failed", {"run": 2, "native_module": "/somewhere/_cuda.abi3.so"}),
    )
    kept = keep.keep([first, second])
    runs = {one["name"]: one["commands"][0]["result"]["run"] for one in kept["steps"]}
    assert runs == {"smoke": 2, "micro": 1, "doctor": 2}
    statuses = {one["name"]: one["status"] for one in kept["steps"]}
    assert statuses["doctor"] == "failed"
    (doctor,) = [one for one in kept["steps"] if one["name"] == "doctor"]
    assert doctor["commands"] == [{"result": {"run": 2, "native_module": "_cuda.abi3.so"}}]
