"""Runs the short form of the demo as a user would: it learns, and reports its results."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from checkout import ROOT

from jax_bnar._kernels import targets

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

for module in ("matplotlib", "rich", "sklearn", "tyro"):
    pytest.importorskip(module, reason="the demo needs what jax-bnar[demo] installs")

DEMO = ROOT / "examples" / "digits" / "train.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_BNAR_IMPLEMENTATION"}
    return subprocess.run(
        [sys.executable, DEMO, *arguments],
        env=environment,
        timeout=500,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path, dict[str, Any]]:
    if left := os.environ.get("JAX_BNAR_TEST_DEMO"):
        # .ci/run has just run it with these arguments.
        output = pathlib.Path(left)
        printed = (output / "printed.txt").read_text()
    else:
        output = tmp_path_factory.mktemp("demo")
        finished = run("--quick", "--check", "--output", str(output))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        printed = finished.stdout
    return printed, output, json.loads((output / "digits.json").read_text())


def test_both_networks_learn(quick: tuple[str, pathlib.Path, dict[str, Any]]) -> None:
    printed, _, results = quick
    assert results["passed"]
    assert set(results["networks"]) == {"fused", "plain"}
    for outcome in results["networks"].values():
        assert outcome["held_out_accuracy"] >= results["gate"] > 0.8
        assert outcome["steps_per_second"] > 0
        assert len(outcome["losses"]) == results["settings"]["epochs"] * (
            results["training_images"] // results["settings"]["batch_size"]
        )
        assert f"{outcome['held_out_accuracy']:.2%}" in printed


def test_the_networks_agree_until_rounding_has_grown(
    quick: tuple[str, pathlib.Path, dict[str, Any]],
) -> None:
    _, _, results = quick
    fused, plain = (results["networks"][name]["losses"] for name in ("fused", "plain"))
    early = results["early_steps"]
    differences = [abs(a - b) for a, b in zip(fused[:early], plain[:early], strict=True)]
    assert all(difference < 1e-3 for difference in differences)
    assert results["max_early_loss_difference"] == max(differences)
    assert fused != plain  # these are two networks, not one reported twice


def test_it_runs_the_kernels_that_are_there(
    quick: tuple[str, pathlib.Path, dict[str, Any]],
) -> None:
    _, _, results = quick
    available = ("forward", results["platform"]) in targets.kernels
    assert results["kernels_in_use"] == available
    # Two sites with each allocator; what people have, the default one, comes first.
    allocators = [site["allocator"] for site in results["sites"]]
    assert allocators in (["default"] * 2, ["default"] * 2 + ["jemalloc"] * 2)
    for site in results["sites"]:
        assert site["fused_ms"] > 0
        assert site["xla_ms"] > 0
        assert site["speedup"] == pytest.approx(site["xla_ms"] / site["fused_ms"])


def test_it_draws(quick: tuple[str, pathlib.Path, dict[str, Any]]) -> None:
    _, output, _ = quick
    assert (output / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_of_one_step(tmp_path: pathlib.Path) -> None:
    finished = run("--epochs", "1", "--batch-size", "1437", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_help_names_every_option() -> None:
    finished = run("--help")
    assert finished.returncode == 0
    for option in ("--epochs", "--seed", "--output", "--quick", "--check"):
        assert option in finished.stdout
