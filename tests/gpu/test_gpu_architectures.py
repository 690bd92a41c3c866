"""Blocks of other architectures: what is compiled of them, and what the documentation says."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from checkout import ROOT
from tiers import slow_except

from benchmarks.gpu.architectures import __main__ as command
from benchmarks.gpu.architectures import timed
from benchmarks.gpu.architectures.blocks import BLOCKS
from benchmarks.gpu.architectures.programs import VARIANTS, program_of
from benchmarks.gpu.compiled import targets

pytestmark = pytest.mark.one_python

RESULTS = ROOT / "benchmarks" / "results" / "gpu-architectures.json"


@pytest.fixture(autouse=True)
def _promotion_of_users() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", slow_except({"VGG", "RepVGG", "channels first"}, list(BLOCKS)))
def test_variants_differ_in_nothing_but_the_batch_norm(name: str) -> None:
    programs = [program_of(name, variant, "bfloat16") for variant in VARIANTS]
    shapes = [
        jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype),
            jax.eval_shape(program.function, program.whole, program.divided),
        )
        for program in programs
    ]
    leaves = [sorted(map(str, jax.tree.leaves(each))) for each in shapes]
    assert leaves[0] == leaves[1] == leaves[2]


def committed() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())["rows"]


def test_every_block_is_committed() -> None:
    found = [(row["block"], row["gpu"], row["dtype"]) for row in committed()]
    assert found == [(name, *case) for name in BLOCKS for case in command.CASES]
    for row in committed():
        assert row["calls"]["layer"].keys() <= row["calls"]["fuse"].keys(), row["block"]
        assert row["calls"]["flax"] == {}


def test_fused_blocks_move_less_than_plain_flax() -> None:
    for row in committed():
        assert command.ratio(row, "fuse") < 1.005, row["block"]
        # One more may be of an argument or a result of the block.
        assert row["copies"]["fuse"] <= row["copies"]["flax"] + 1, row["block"]


def test_the_documentation_has_the_numbers() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    for name in BLOCKS:
        ratios = [
            f"{command.ratio(row, 'fuse'):.2f}, {command.ratio(row, 'layer'):.2f}"
            for row in committed()
            if row["block"] == name
        ]
        assert f"| {name} | {' | '.join(ratios)} |" in text
    heads = [f"{targets.TITLES[gpu]}, {dtype}" for gpu, dtype in command.CASES]
    assert f"| block | {' | '.join(heads)} |" in text


@pytest.mark.parametrize("main", [command.main, timed.main])
def test_unknown_blocks_are_refused(main: Any) -> None:
    with pytest.raises(SystemExit, match=r"--block must be of VGG, .*; got AlexNet\."):
        main(["--block", "AlexNet"])


@pytest.mark.slow
def test_timing_on_the_device_of_jax(tmp_path: Path) -> None:
    output = tmp_path / "timed.json"
    arguments = ["--divide-batch", "64", "--rounds", "2", "--sample-ms", "1"]
    timed.main(["--block", "VGG", "TDNN", *arguments, "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert [(row["block"], row["dtype"]) for row in rows] == [
        (block, dtype) for block in ("VGG", "TDNN") for dtype in ("bfloat16", "float32")
    ]
    for row in rows:
        assert row["errors"]["flax"] == 0 < row["errors"]["fuse"]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["ms"].values())
