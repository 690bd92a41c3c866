"""The benchmark of the residual joins: what it counts and sums up, with a tiny batch."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks.gpu.inference_joins import JOINS
from benchmarks.network import inference_joins

RESULTS = Path(inference_joins.__file__).parents[1] / "results"


@pytest.fixture(autouse=True)
def _default_promotion():
    """As a user runs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_joins_are_those_of_the_profile() -> None:
    assert sum(JOINS.values()) == 16


def test_one_pass_moves_three_arrays_of_five(tmp_path: Path) -> None:
    output = tmp_path / "joins.json"
    document = inference_joins.main(
        [
            *("--batch", "1", "--rounds", "2", "--min-sample-ms", "0", "--joins", "2048x7x7"),
            *("--copy-mib-per-core", "1", "--output", str(output)),
        ]
    )
    assert json.loads(output.read_text())["total"] == document["total"]
    (row,) = document["joins"]
    array, vector = 4 * 2048 * 49, 4 * 2048
    peers = row["peers"]
    assert peers["two_passes"]["bytes"] == 5 * array + vector
    assert peers["xla"]["bytes"] == 3 * array + vector
    # The kernel reads a mean and a variance, too, which another instruction has filled.
    assert 3 * array + 3 * vector <= peers["ours"]["bytes"] <= 3 * array + 6 * vector
    assert document["total"]["ours_over"]["two_passes"]["bytes"] <= 0.65


@pytest.mark.parametrize("allocator", ["jemalloc", "default"])
def test_committed_results(allocator: str) -> None:
    """At batch 10, vectors are negligible: at most 0.61 of the bytes of ADD and FUSE_ADD_RELU."""
    path = RESULTS / f"inference-joins-cpu-xeon-2core-{allocator}.json"
    document = json.loads(path.read_text())
    assert document["settings"]["batch"] == 10
    assert sum(row["count"] for row in document["joins"]) == 16
    for row in document["joins"]:
        peers = row["peers"]
        assert peers["ours"]["bytes"] <= 0.61 * peers["two_passes"]["bytes"]
    # Python 3.12 and later sum floats with less rounding than 3.11, which made the file.
    summed = inference_joins.summarise(document["joins"])
    for name, group in summed.items():
        for key, values in group.items():
            assert document["total"][name][key] == pytest.approx(values, rel=1e-12)
    assert jax.tree.structure(document["total"]) == jax.tree.structure(summed)


def test_ratio_of_rounds() -> None:
    """By hand: two shapes, one of them twice."""

    def row(count: int, **samples: list[float]) -> dict:
        peers = {
            name: {**dict.fromkeys(inference_joins._SUMMED, 1), "samples_ms": times}
            for name, times in samples.items()
        }
        return {"count": count, "peers": peers}

    total = inference_joins.summarise(
        [
            row(2, ours=[1, 1, 4], xla=[1, 2, 2], two_passes=[2, 2, 2]),
            row(1, ours=[2, 2, 4], xla=[2, 4, 2], two_passes=[4, 4, 4]),
        ]
    )
    assert total["ours_over"]["xla"]["median_of_rounds"] == 1.0
    assert total["ours_over"]["two_passes"]["median_of_rounds"] == 0.5
    assert total["peers"]["ours"]["bytes"] == 3
