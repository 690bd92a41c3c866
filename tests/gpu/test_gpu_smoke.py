"""Tests, on the CPU, the program that `make gpu` runs first: what it says if a strategy fails."""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.common.kernels import planner
from benchmarks.gpu import smoke
from benchmarks.gpu.model.devices import DEVICES


@pytest.fixture(autouse=True)
def default_promotion(monkeypatch: pytest.MonkeyPatch):
    """Programs run with JAX's default promotion, and leave the variable behind."""
    monkeypatch.setenv("JAX_BNAR_CUDA_STRATEGY", "auto")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "smoke.json"
    status = smoke.main(["--platform", "cpu", "--output", str(output)])
    return status, json.loads(output.read_text())


def test_all_strategies_work_here(tmp_path: Path) -> None:
    status, document = run(tmp_path)
    assert status == 0
    assert document["complete"]
    assert [line.split()[0] for line in document["summary"][1:]] == list(smoke.STRATEGIES)
    for entry in document["strategies"].values():
        assert entry["few_blocks_runs"] == entry["graph_runs"] == smoke._DRY_RUNS
    with_dual = [name for name, entry in document["strategies"].items() if "dual_errors" in entry]
    assert with_dual == ["two_kernels"]


def test_a_wrong_gradient_of_the_dual_join_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dual_step = smoke.dual_step

    def wrong(*operands: Any, **options: Any) -> Any:
        result, (dx1, dx2, *others) = dual_step(*operands, **options)
        return result, (dx1, dx2 * (1.1 if not options else 1), *others)

    monkeypatch.setattr(smoke, "STRATEGIES", ("auto", "on_chip"))
    monkeypatch.setattr(smoke, "dual_step", wrong)
    status, document = run(tmp_path)
    assert status == 1
    assert "dual: ValueError: y, mean1" in document["strategies"]["auto"]["error"]
    assert "error" not in document["strategies"]["on_chip"]


def test_a_wrong_gradient_is_found_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = smoke.step

    def wrong(*operands: Any, **options: Any) -> Any:
        result, (dx, *others) = step(*operands, **options)
        return result, (dx * 1.1, *others)

    monkeypatch.setattr(smoke, "STRATEGIES", ("two_kernels", "on_chip"))
    original = smoke.run_alone
    calls: list[str] = []

    def run_alone(operands: Any, expected: Any, entry: dict[str, Any]) -> Any:
        calls.append("alone")
        monkeypatch.setattr(smoke, "step", wrong if len(calls) == 1 else step)
        return original(operands, expected, entry)

    monkeypatch.setattr(smoke, "run_alone", run_alone)
    status, document = run(tmp_path)
    assert status == 1
    assert (
        "alone: ValueError: y, mean, var, dx, dz" in document["strategies"]["two_kernels"]["error"]
    )
    assert "error" not in document["strategies"]["on_chip"]
    assert document["errors"] == [f"two_kernels, {document['strategies']['two_kernels']['error']}"]


def test_what_hangs_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "smoke.json"

    def hang(*_: Any) -> None:
        raise KeyboardInterrupt  # as good as a kill: nothing is written afterwards

    monkeypatch.setattr(smoke, "run_graph", hang)
    with pytest.raises(KeyboardInterrupt):
        smoke.main(["--platform", "cpu", "--output", str(output)])
    assert json.loads(output.read_text())["running"] == "two_kernels, graph"


def test_few_blocks_fill_slots_anew_in_several_teams() -> None:
    """What `on_chip` plans for the variables, on an H200 of which four multiprocessors are left."""
    rows = math.prod(smoke.SHAPE[:-1])
    for arrays_kept, traffic in (
        (1, planner().cuda_forward_traffic("bfloat16", True, True)),
        (2, planner().cuda_backward_traffic("bfloat16", "mask", True)),
    ):
        assert traffic["arrays_kept"] == arrays_kept
        plan = planner().cuda_plan(
            (1, rows, smoke.SHAPE[-1], 1), "bfloat16", traffic, DEVICES["h200"].attributes(),
            planner().cuda_cost_model(), planner().cuda_planned_models(), "on_chip",
            slab_channels=int(smoke.FEW_BLOCKS["JAX_BNAR_CUDA_SLAB_CHANNELS"]),
            teams=int(smoke.FEW_BLOCKS["JAX_BNAR_CUDA_TEAMS"]),
            sm_margin=132 - 4,
        )  # fmt: skip
        assert plan["strategy"] == "on_chip"
        assert plan["grid"] == 8
        assert plan["teams"] == 2
        assert plan["rounds"] >= 4
        assert plan["tiles"] > plan["tiles_kept"]


def test_a_wrong_result_of_few_blocks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = smoke.step

    def wrong(*operands: Any, **options: Any) -> Any:
        result, (dx, *others) = step(*operands, **options)
        few = "JAX_BNAR_CUDA_TEAMS" in os.environ
        return result, (dx * (1.1 if few else 1), *others)

    monkeypatch.setattr(smoke, "STRATEGIES", ("on_chip",))
    monkeypatch.setattr(smoke, "step", wrong)
    status, document = run(tmp_path)
    assert status == 1
    assert "few blocks: ValueError: y, mean" in document["strategies"]["on_chip"]["error"]
    assert "JAX_BNAR_CUDA_TEAMS" not in os.environ


def test_a_rare_difference_between_runs_is_found() -> None:
    given = jnp.arange(4, dtype=jnp.float32)
    runs = itertools.count(1)

    def one_bit_is_wrong_in_the_seventh_run(x: jax.Array) -> tuple[jax.Array, ...]:
        return x, jnp.nextafter(x, jnp.float32(9)) if next(runs) == 7 else x

    with pytest.raises(ValueError, match="1 of 10 runs have other results than the first one"):
        smoke.require_equal_runs(one_bit_is_wrong_in_the_seventh_run, (given,), (given, given))
    assert next(runs) == smoke._DRY_RUNS + 1


def test_results_of_a_graph_are_those_of_the_kernels_alone() -> None:
    operands = smoke.make_operands((2, 3, 3, 8))
    entry: dict[str, Any] = {"kernels": []}
    expected = jax.jit(lambda *given: smoke.step(*given))(*operands)
    smoke.run_graph(operands, expected, entry)
    assert entry["replayed"] is None  # no CUDA kernel was launched
    other = jax.tree.map(lambda array: array + jnp.ones_like(array), expected)
    with pytest.raises(ValueError, match="the results are others than alone"):
        smoke.run_graph(operands, other, entry)
