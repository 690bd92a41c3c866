"""The model of the CUDA kernels: by hand, against committed numbers, and as it is printed."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from checkout import ROOT

for _package in ("flax", "matplotlib", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.common import kernels  # noqa: E402
from benchmarks.common.kernels import planner  # noqa: E402
from benchmarks.common.sites import (  # noqa: E402
    RESNET50_SITES,
    RESNET50_SITES_WITH_DUAL_JOINS,
    one_read_bytes,
)
from benchmarks.figures.gpu_model import parts_of  # noqa: E402
from benchmarks.gpu.model import __main__ as command  # noqa: E402
from benchmarks.gpu.model import predict as predict_module  # noqa: E402
from benchmarks.gpu.model import write  # noqa: E402
from benchmarks.gpu.model.devices import DEVICES  # noqa: E402
from benchmarks.gpu.model.predict import Assumptions, predict  # noqa: E402
from benchmarks.gpu.model.range import markdown, over_the_range  # noqa: E402
from jax_bnar._kernels import targets  # noqa: E402

pytestmark = pytest.mark.one_python

H200 = DEVICES["h200"]
# Bytes a microsecond: both edges of 3201 MHz, 6144 bits wide.
NOMINAL = 4_916_736
COPY = 0.875 * NOMINAL
STREAMING = 0.92 * COPY


def share_of_copy(kib_in_flight: float) -> float:
    """0.92 up to 32 KiB; then what is missing falls in inverse proportion to what is in flight."""
    return 1 - 0.08 * min(1, 32 / kib_in_flight)


def site(document: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = (row for row in document["sites"] if row["site"] == label)
    return found


def test_a_site_on_chip_is_what_one_computes_by_hand() -> None:
    """14x14x1024 without activation, forward, batch 256, bfloat16: all of it stays on chip.

    A slab has 50176 rows of 64 channels: 1568 tiles of 32 rows, or 4 KiB. With two blocks on a
    multiprocessor, a block has 113 KiB, of which 12.5 hold sums and constants: 25 tiles. 63 blocks
    hold a slab, so 264 blocks are four teams of 66, and 16 slabs are four rounds. 24 tiles are in
    flight when a slab begins, and none in the end. While a team waits for 3.25 us, memory reads and
    writes slabs of the others, except at the start and the end.
    """
    document = predict(H200, 256, "bfloat16", "mask", Assumptions(slab_channels=64))
    forward = site(document, "14x14x1024 batch_norm")["forward"]
    array = 256 * 14 * 14 * 1024 * 2
    assert forward["strategy"] == "on_chip"
    assert (forward["team"], forward["teams"], forward["rounds"]) == (66, 4, 4)
    assert forward["kept_share"] == 1
    assert forward["bytes"] == 2 * array
    assert forward["bytes_in_flight"] == pytest.approx((2 * 48 + 2 * 16) / 2 * 1024)
    reading = array / COPY / share_of_copy(2 * 48)
    assert forward["streaming_us"] == pytest.approx(reading + array / STREAMING)
    # The slowest block takes 3 % longer for its part of a slab.
    wait = 3.25 + 0.03 * reading / 4
    assert forward["waiting_us"] == pytest.approx(wait * (0.75 + 4 * 0.1))
    assert forward["launching_us"] == 3
    assert forward["predicted_us"] == pytest.approx(24.545 + 25.963 + 3.949 + 3, abs=1e-2)
    assert forward["floor_us"] == pytest.approx(2 * array / COPY)
    assert not forward["instructions_limit"]


def test_a_site_that_streams_is_what_one_computes_by_hand() -> None:
    """56x56x256 with residual, forward: a slab of 64 channels has 96 tiles for each block.

    24 of them stay in slots. In both passes, a thread waits until 5 of 6 stages are left, uses the
    four tiles of one and starts the copies of another. Half of L2 has a part of the other 72 tiles.
    """
    document = predict(H200, 256, "bfloat16", "mask")
    forward = site(document, "56x56x256 bn_add_relu")["forward"]
    array = 256 * 56 * 56 * 256 * 2
    assert (forward["slab_channels"], forward["team"], forward["teams"]) == (64, 262, 1)
    assert (forward["rounds"], forward["tiles_ahead"]) == (4, 0)
    assert forward["kept_share"] == pytest.approx(24 / 96)
    again = 4 * (72 * 262 * 4096 - 30 * 2**20)
    assert forward["bytes_again"] == pytest.approx(again)
    tiles = {"first": 24 - 24**2 / (2 * 96), "second": 24 * 72 / 96}
    # Two of 132 multiprocessors have one block.
    first, second = (
        COPY * (130 * share_of_copy(2 * 4 * n) + 2 * share_of_copy(4 * n)) / 132
        for n in tiles.values()
    )
    mask_z_and_y = (2 + 1 / 16) * array
    streaming = array / first + (mask_z_and_y + again) / second
    assert forward["streaming_us"] == pytest.approx(streaming, rel=1e-4)
    wait = 3.25 + 0.03 * array / first / 4
    assert forward["waiting_us"] == pytest.approx(4 * wait, rel=1e-4)


def test_tiles_ahead_cover_a_wait_as_one_computes_by_hand() -> None:
    """The same where 8 of the 24 slots are for the next slab, which none has after the last."""
    assumptions = Assumptions(strategy="on_chip", tiles_ahead=8)
    forward = site(predict(H200, 256, "bfloat16", "mask", assumptions), "56x56x256 bn_add_relu")[
        "forward"
    ]
    array = 256 * 56 * 56 * 256 * 2
    assert (forward["rounds"], forward["tiles_ahead"]) == (4, 8)
    tiles = 24 - 24**2 / (2 * 96)
    first = COPY * (130 * share_of_copy(2 * 4 * tiles) + 2 * share_of_copy(4 * tiles)) / 132
    # At 2 instructions a cycle, 0.625 of the first pass remain.
    slab = array / first / 4
    covered = min(8 * 4096 * 262 / STREAMING, 0.375 * slab)
    wait = 3.25 + 0.03 * slab
    assert forward["waiting_us"] == pytest.approx(3 * (wait - covered) + wait, rel=1e-4)


def test_narrow_rows_are_slower_and_fill_half_of_l2() -> None:
    """The same with slabs of 32 channels: rows of 64 bytes, half a line of L2."""
    whole, half = (
        site(
            predict(H200, 256, "bfloat16", "mask", Assumptions(constants, "on_chip", 32)),
            "56x56x256 bn_add_relu",
        )["forward"]
        for constants in ({"narrow_share": 1.0}, {"narrow_share": 0.5})
    )
    assert whole["slab_channels"] == half["slab_channels"] == 32
    for one in (whole, half):
        kept = one["kept_share"] * 48
        # A slab is 48 tiles for each of 262 blocks.
        assert one["bytes_again"] == pytest.approx(8 * ((48 - kept) * 262 * 4096 - 15 * 2**20))
    assert half["streaming_us"] > 1.9 * whole["streaming_us"]


def test_a_site_with_two_kernels_is_what_one_computes_by_hand() -> None:
    """The stem, backward: dy, x and the mask, then again all of it that half of L2 has not kept."""
    document = predict(H200, 256, "bfloat16", "mask", Assumptions(strategy="two_kernels"))
    backward = site(document, "112x112x64 bn_relu")["backward"]
    array = 256 * 112 * 112 * 64 * 2
    again = (2 + 1 / 16) * array - 30 * 2**20
    assert backward["strategy"] == "two_kernels"
    assert backward["bytes_again"] == pytest.approx(again)
    assert backward["bytes"] == pytest.approx((2 + 1 / 16 + 1) * array + again)
    assert backward["waiting_us"] == 4
    assert backward["launching_us"] == 2 * 1.5
    assert backward["floor_us"] == pytest.approx(3 * array / COPY)


def test_dual_joins_are_what_one_computes_by_hand() -> None:
    """Forward reads both inputs twice and writes y; backward reads dy too, and writes dx1 and dx2.

    Half of L2 keeps what was read last.
    """
    document = predict(H200, 256, "bfloat16", "y", sites=RESNET50_SITES_WITH_DUAL_JOINS)
    rows = document["sites"]
    assert sum(row["count"] for row in rows) == 53 - 4
    dual = [row for row in rows if row["site"].endswith(" dual_bn_add_relu")]
    assert [row["site"].split()[0] for row in dual] == [
        "56x56x256", "28x28x512", "14x14x1024", "7x7x2048",
    ]  # fmt: skip
    sizes = (56 * 56 * 256, 28 * 28 * 512, 14 * 14 * 1024, 7 * 7 * 2048)
    for row, elements in zip(dual, sizes, strict=True):
        array = 256 * elements * 2
        assert row["count"] == 1
        assert row["forward"]["strategy"] == row["backward"]["strategy"] == "two_kernels"
        assert row["forward"]["bytes"] == pytest.approx(5 * array - 30 * 2**20)
        assert row["backward"]["bytes"] == pytest.approx(8 * array - 30 * 2**20)
        assert row["floor_us"] == pytest.approx(8 * array / COPY)
    assert document["sum_ms"] < predict(H200, 256, "bfloat16", "y")["sum_ms"]


def test_instructions_limit_a_pass_if_few_are_issued() -> None:
    few = Assumptions({"instructions_per_cycle": 0.1}, slab_channels=64)
    document = predict(H200, 256, "bfloat16", "mask", few)
    forward = site(document, "14x14x1024 batch_norm")["forward"]
    counted = json.loads(predict_module.INSTRUCTIONS.read_text())["loops"]["bfloat16"]
    vectors = 256 * 14 * 14 * 1024 / 8 / 32  # of a whole warp
    instructions = counted["Forward none kept sums"] + counted["Forward none shared"]
    assert forward["instructions_limit"]
    assert forward["streaming_us"] == pytest.approx(
        instructions * vectors / 0.1 / (1980 * 132) + forward["ahead_us"], rel=1e-6
    )


def test_the_committed_numbers_are_those_of_the_tree() -> None:
    """A change of kernels or planner that should make them faster shows here, and is committed."""
    committed = json.loads(write.RESULTS.read_text())
    now, structure = jax.tree.flatten(write.predictions())
    then, structure_then = jax.tree.flatten(committed)
    assert structure == structure_then
    for value, expected in zip(now, then, strict=True):
        matches = value == (pytest.approx(expected) if isinstance(value, float) else expected)
        assert matches, f"{value} is not {expected}: commit what `make figures` writes"


def test_the_sum_is_that_of_53_sites() -> None:
    document = predict(H200, 256, "bfloat16", "mask")
    rows = document["sites"]
    assert sum(row["count"] for row in rows) == 53
    assert sum(row["count"] * row["predicted_us"] for row in rows) / 1e3 == document["sum_ms"]
    assert all(0 < row["floor_share"] < 1 for row in rows)


def test_the_parts_of_the_figure_add_up() -> None:
    document = predict(H200, 256, "bfloat16", "mask")
    for row in document["sites"]:
        for direction in (row["forward"], row["backward"]):
            parts = parts_of(direction, document["copy_bytes_per_us"])
            assert sum(parts) == pytest.approx(direction["predicted_us"])
            assert min(parts) > -1e-6


def test_the_floor_is_every_tensor_once_at_the_rate_of_a_copy() -> None:
    document = predict(H200, 256, "bfloat16", "mask")
    total = sum(site.count * one_read_bytes(site, 256, 2) for site in RESNET50_SITES)
    assert document["floor_ms"] == pytest.approx(total / COPY / 1e3)


def test_one_number_puts_in_a_measured_barrier_or_bandwidth() -> None:
    def of(**constants: float) -> dict[str, Any]:
        return predict(H200, 256, "bfloat16", "mask", Assumptions(constants))

    assert of(barrier=1)["sum_ms"] < of()["sum_ms"] < of(barrier=12)["sum_ms"]
    assert of(kernel_share=0.97)["sum_ms"] < of()["sum_ms"]

    def barriers(document: dict[str, Any]) -> int:
        return sum(
            row["count"] * row[direction]["rounds"]
            for row in document["sites"]
            for direction in ("forward", "backward")
            if row[direction]["strategy"] == "on_chip"
        )

    # The planner follows.
    assert barriers(of(barrier=100)) < barriers(of())
    with pytest.raises(ValueError, match="bariers is none of the constants barrier, "):
        of(bariers=1)


def test_attributes_are_those_of_the_data_sheets() -> None:
    terabytes = {name: device.bytes_per_us / 1e6 for name, device in DEVICES.items()}
    assert terabytes == pytest.approx(
        {"h200": 4.917, "h100": 3.352, "a100": 2.039, "l4": 0.300}, abs=1e-3
    )
    # As published: a copy on an H200 moves 4.3 TB/s.
    assert pytest.approx(4.3e6, rel=1e-3) == COPY


def test_doubles_take_long_on_devices_for_graphics() -> None:
    """Where double has a 64th of float's rate, waiting for sums is what decides."""
    usual = dataclasses.replace(DEVICES["l4"], single_to_double=2)
    slow, fast = (
        predict(device, 32, "bfloat16", "mask", Assumptions(strategy="on_chip"))
        for device in (DEVICES["l4"], usual)
    )
    waits = {
        name: sum(
            row["count"] * row[name]["rounds"]
            for row in slow["sites"]
            if row[name]["teams"] == 1 and row[name]["rounds"] == 1
        )
        for name in ("forward", "backward")
    }
    assert sum(waits.values()) > 0
    # 31 times half a microsecond in each of those waits, which nothing covers.
    assert slow["sum_ms"] - fast["sum_ms"] >= sum(waits.values()) * 31 * 0.5e-3 * 0.99
    free = predict(DEVICES["l4"], 32, "bfloat16", "mask")
    assert free["sum_ms"] <= slow["sum_ms"]


def test_the_range_says_what_the_plans_may_lose() -> None:
    rows = over_the_range(H200, 32, "bfloat16", "mask")
    assert rows[0]["constants"] == {}
    as_assumed = predict(H200, 32, "bfloat16", "mask")["sum_ms"]
    assert rows[0]["built_ms"] == pytest.approx(as_assumed)
    ranges = planner().cuda_cost_ranges()
    assert ranges == {
        "narrow_share": (0.8, 1), "barrier": (1.5, 5), "instructions_per_cycle": (1.5, 2.5),
    }  # fmt: skip
    ends = {(name, value) for name, values in ranges.items() for value in values}
    assert ends <= {tuple(item) for row in rows for item in row["constants"].items()}
    best, worst = rows[-2], rows[-1]
    assert worst["constants"] == {"narrow_share": 0.8, "barrier": 5, "instructions_per_cycle": 1.5}
    assert best["built_ms"] < as_assumed < worst["built_ms"]
    # The planner's instructions are not quite those of the model, hence a trifle below 0.
    assert all(row["built_ms"] > 0.998 * row["sure_ms"] for row in rows)


def test_the_range_in_the_documentation_is_that_of_the_tree() -> None:
    rows = json.loads(write.RESULTS.read_text())["range"]
    text = (ROOT / "docs/performance.md").read_text()
    missing = [line for line in markdown(rows) if line not in text]
    assert not missing, "\n".join(["docs/performance.md lacks:", *missing])


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_device_has_a_table(device: str, dtype: str) -> None:
    document = command.main(["--device", device, "--dtype", dtype, "--save", "y", "--batch", "32"])
    strategies = {
        row[name]["strategy"] for row in document["sites"] for name in ("forward", "backward")
    }
    assert strategies <= {"on_chip", "cluster", "two_kernels"}
    assert ("cluster" in strategies) <= (device in ("h200", "h100"))


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.model", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return finished.stdout


def results(path: Path, factor: float, *left_out: str, kind: str = "NVIDIA H200") -> Path:
    """What benchmark_jax writes, with times that are the prediction times `factor`."""
    document = predict(H200, 256, "bfloat16", "mask")
    rows = [
        {
            "site": row["site"], "batch": 256, "dtype": "bfloat16", "peer": "ours_mask",
            "median_ms": factor * row["predicted_us"] / 1e3,
        }
        for row in document["sites"]
        if row["site"] not in left_out
    ]  # fmt: skip
    path.write_text(json.dumps({"family": "jax", "device": {"kind": kind}, "rows": rows}))
    return path


@pytest.mark.slow
def test_json_and_table(tmp_path: Path) -> None:
    document = json.loads(run("--json", "--device", "h200"))
    assert {"sum_ms", "floor_ms", "sites"} <= set(document)
    assert document["sites"][0]["backward"]["rounds"] >= 1
    measured = results(tmp_path / "measured.json", 1.25)
    printed = run("--measured", str(measured))
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "MODELLED, not measured" in printed
    (total,) = re.findall(r"sum in ms.*", printed)
    assert total.split()[-1] == f"{1.25 * document['sum_ms']:.2f}"
    assert "   backward" in printed


def test_measured_times_need_the_same_settings(tmp_path: Path) -> None:
    path = results(tmp_path / "measured.json", 2.0, "7x7x2048 batch_norm")
    document = command.main(["--measured", str(path)])
    assert document["measured_ms"] is None  # a site is missing
    assert site(document, "7x7x2048 batch_norm")["measured_us"] is None
    first = document["sites"][0]
    assert first["measured_us"] == pytest.approx(2 * first["predicted_us"])
    with pytest.raises(SystemExit, match="has no time of ours at batch 256 in bfloat16: measure"):
        command.main(["--measured", str(path), "--save", "y"])


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_the_model_is_that_of_the_measured_device(tmp_path: Path, kind: str, title: str) -> None:
    path = results(tmp_path / "measured.json", 2.0, kind=kind)
    assert command.main(["--measured", str(path)])["device"] == title


def test_a_measured_device_without_a_model(tmp_path: Path) -> None:
    path = results(tmp_path / "measured.json", 2.0, kind="NVIDIA L40S")
    with pytest.raises(SystemExit, match="measured on 'NVIDIA L40S', which the model does not"):
        command.main(["--measured", str(path)])
    document = command.main(["--measured", str(path), "--device", "a100"])
    assert document["device"] == "A100 80GB SXM"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--constants", "barrier=fast"], "takes NAME=NUMBER, got 'barrier=fast'"),
        (["--constants", "barier=3"], "barier is none of the constants"),
        (["--range", "--slab-channels", "32"], "--range takes only --device, --batch, --dtype"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command.main(arguments)


def test_without_a_native_module_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_error", ImportError("no such file"))
    with pytest.raises(SystemExit, match=r"The planner is in the native module, but .*; install"):
        command.main([])


def test_counts_are_those_of_the_compiled_kernels() -> None:
    module = getattr(targets.cuda, "__file__", None)
    if module is None or 90 not in targets.cuda.cuda_architectures():
        pytest.skip("there are no CUDA kernels for sm_90 in this installation")
    finished = subprocess.run(
        [
            sys.executable, ROOT / ".ci/cuda_instructions.py", module,
            "--compare", predict_module.INSTRUCTIONS,
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if "were not counted" in finished.stdout:
        pytest.skip(finished.stdout.strip())
    assert finished.returncode == 0, finished.stdout
