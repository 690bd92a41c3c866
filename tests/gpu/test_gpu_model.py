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
MODEL = planner().cuda_cost_model()
# Bytes a microsecond: both edges of 3201 MHz, 6016 bits wide, as the driver reports.
NOMINAL = 4_814_304
COPY = MODEL["copy_share"] * NOMINAL
# What L2, of 60 MiB, still has when it is read again.
IN_L2 = MODEL["share_of_l2"] * 60 * 2**20


def share_of_copy(kib_in_flight: float) -> float:
    """What is missing up to 32 KiB falls in inverse proportion to what is in flight beyond that."""
    return 1 - (1 - MODEL["kernel_share"]) * min(1, 32 / kib_in_flight)


def wait(rounds: int, columns: int, first: float, second: float) -> float:
    """What a team waits that adds all columns in one turn, if the passes take so long.

    The slowest block is late by a share of what comes before each wait, which is all but the second
    pass of the last round.
    """
    barrier = MODEL["barrier"] + columns * MODEL["barrier_of_column"]
    return rounds * barrier + MODEL["skew"] * (first + second * (rounds - 1) / rounds)


def site(document: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = (row for row in document["sites"] if row["site"] == label)
    return found


def test_a_site_on_chip_is_what_one_computes_by_hand() -> None:
    """14x14x1024 without activation, forward, batch 256, bfloat16: all of it stays on chip.

    A slab has 50176 rows of 64 channels: 1568 tiles of 32 rows, or 4 KiB. With two blocks on a
    multiprocessor, a block has 113 KiB, of which 17 hold sums and constants: 24 tiles. Of 264
    blocks, four teams of 66 have 24 tiles of a slab each, and take 16 slabs in four rounds. 24
    tiles are in flight when a slab begins, and none in the end. Rows of 128 bytes are slower.
    """
    assumptions = Assumptions(slab_channels=64, teams=4)
    forward = site(predict(H200, 256, "bfloat16", "mask", assumptions), "14x14x1024 batch_norm")[
        "forward"
    ]
    array = 256 * 14 * 14 * 1024 * 2
    assert forward["strategy"] == "on_chip"
    assert (forward["team"], forward["teams"], forward["rounds"]) == (66, 4, 4)
    assert forward["kept_share"] == 1
    assert forward["bytes"] == 2 * array
    assert forward["bytes_in_flight"] == pytest.approx((2 * 48 + 2 * 16) / 2 * 1024)
    rate = COPY * MODEL["line_share"]
    reading = array / rate / share_of_copy(2 * 48)
    writing = array / rate / MODEL["kernel_share"]
    assert forward["streaming_us"] == pytest.approx(reading + writing)
    assert forward["waiting_us"] == pytest.approx(wait(4, 64, reading, writing))
    assert forward["launching_us"] == MODEL["cooperative_kernel"]
    assert forward["predicted_us"] == pytest.approx(
        reading + writing + forward["waiting_us"] + forward["launching_us"]
    )
    assert forward["floor_us"] == pytest.approx(2 * array / COPY)
    assert not forward["instructions_limit"]


def test_a_site_that_streams_is_what_one_computes_by_hand() -> None:
    """56x56x256 with residual, forward: a slab of 128 channels has 191 tiles for some blocks.

    24 of them stay in slots. In both passes, a thread waits until 5 of 6 stages are left, uses the
    four tiles of one and starts the copies of another. L2 has a part of the tiles that do not stay,
    which are whole stages.
    """
    assumptions = Assumptions(strategy="on_chip", slab_channels=128, teams=1)
    forward = site(predict(H200, 256, "bfloat16", "mask", assumptions), "56x56x256 bn_add_relu")[
        "forward"
    ]
    array = 256 * 56 * 56 * 256 * 2
    assert (forward["team"], forward["teams"], forward["rounds"]) == (264, 1, 2)
    assert forward["kept_share"] == pytest.approx(24 / 191)
    again = 2 * (168 * 264 * 4096 - IN_L2)
    assert forward["bytes_again"] == pytest.approx(again)
    tiles = {"first": 24 - 24**2 / (2 * 191), "second": 24 * 168 / 191}
    first_rate, second_rate = (COPY * share_of_copy(2 * 4 * n) for n in tiles.values())
    first = array / first_rate
    second = ((2 + 1 / 16) * array + again) / second_rate  # the mask, z and y
    assert forward["streaming_us"] == pytest.approx(first + second)
    assert forward["waiting_us"] == pytest.approx(wait(2, 128, first, second))


@pytest.mark.parametrize(("constant", "times"), [("column", 256), ("turn", 1)])
def test_each_column_and_each_further_turn_of_adding_them_takes_time(
    constant: str, times: int
) -> None:
    """66 blocks add 256 columns of 14x14x1024, at a time one for each half of their 256 threads."""
    constant = f"barrier_of_{constant}"
    less, more = (
        site(
            predict(H200, 256, "bfloat16", "mask", Assumptions(constants, "on_chip", 256, 4)),
            "14x14x1024 batch_norm",
        )["forward"]
        for constants in ({}, {constant: MODEL[constant] + 1})
    )
    assert (less["team"], less["teams"], less["rounds"]) == (66, 4, 1)
    assert more["waiting_us"] - less["waiting_us"] == pytest.approx(times)


@pytest.mark.parametrize(
    ("channels", "constant", "tiles", "of_l2"),
    [(64, "line_share", 96, 1.0), (32, "narrow_share", 48, 0.5)],
)
def test_narrow_rows_are_slower_and_those_of_half_a_line_fill_half_of_l2(
    channels: int, constant: str, tiles: int, of_l2: float
) -> None:
    """The residual join above with slabs of 64 and 32 channels: rows of a line, and of half one."""
    whole, half = (
        site(
            predict(H200, 256, "bfloat16", "mask", Assumptions(constants, "on_chip", channels, 1)),
            "56x56x256 bn_add_relu",
        )["forward"]
        for constants in ({constant: 1.0}, {constant: 0.5})
    )
    assert whole["slab_channels"] == half["slab_channels"] == channels
    for one in (whole, half):
        assert one["kept_share"] == 24 / tiles
        again = 256 / channels * ((tiles - 24) * 264 * 4096 - of_l2 * IN_L2)
        assert one["bytes_again"] == pytest.approx(again)
    assert half["streaming_us"] == pytest.approx(2 * whole["streaming_us"])


@pytest.mark.parametrize(
    ("name", "elements", "once"),
    [
        # The stem: dy and x, then again what of them L2 has not kept, and dx.
        ("112x112x64 bn_relu", 112 * 112 * 64, 3),
        # A join: dy, x, the mask and dz, then dz and x again, and dx.
        ("56x56x256 bn_add_relu", 56 * 56 * 256, 4 + 1 / 16),
    ],
)
def test_a_site_with_two_kernels_is_what_one_computes_by_hand(
    name: str, elements: int, once: float
) -> None:
    document = predict(H200, 256, "bfloat16", "mask", Assumptions(strategy="two_kernels"))
    backward = site(document, name)["backward"]
    array = 256 * elements * 2
    again = 2 * array - IN_L2
    assert backward["strategy"] == "two_kernels"
    assert backward["bytes_again"] == pytest.approx(again)
    assert backward["bytes"] == pytest.approx(once * array + again)
    assert backward["waiting_us"] == MODEL["last_block"]
    assert backward["launching_us"] == 2 * MODEL["kernel"]
    assert backward["floor_us"] == pytest.approx(once * array / COPY)


def test_dual_joins_are_what_one_computes_by_hand() -> None:
    """Forward reads both inputs twice and writes y; backward reads dy too, and writes dx1 and dx2.

    A part of L2 keeps what was read last.
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
        assert row["forward"]["bytes"] == pytest.approx(5 * array - IN_L2)
        assert row["backward"]["bytes"] == pytest.approx(8 * array - IN_L2)
        assert row["floor_us"] == pytest.approx(8 * array / COPY)
    assert document["sum_ms"] < predict(H200, 256, "bfloat16", "y")["sum_ms"]


def test_instructions_limit_a_pass_if_few_are_issued() -> None:
    few = Assumptions({"instructions_per_cycle": 0.1}, slab_channels=64, teams=4)
    document = predict(H200, 256, "bfloat16", "mask", few)
    forward = site(document, "14x14x1024 batch_norm")["forward"]
    counted = json.loads(predict_module.INSTRUCTIONS.read_text())["loops"]["bfloat16"]
    vectors = 256 * 14 * 14 * 1024 / 8 / 32  # of a whole warp
    instructions = counted["Forward none kept sums"] + counted["Forward none shared"]
    assert forward["instructions_limit"]
    assert forward["streaming_us"] == pytest.approx(
        instructions * vectors / 0.1 / (1980 * 132), rel=1e-6
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
        {"h200": 4.814, "h100": 3.352, "a100": 2.039, "l4": 0.300}, abs=1e-3
    )


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
    # A 64th instead of a half takes 31 times as much more, in each of those waits.
    more = 31e-3 * MODEL["double_sums"]
    assert slow["sum_ms"] - fast["sum_ms"] >= sum(waits.values()) * more * 0.99
    free = predict(DEVICES["l4"], 32, "bfloat16", "mask")
    assert free["sum_ms"] <= slow["sum_ms"]


def test_the_range_says_what_the_plans_may_lose() -> None:
    rows = over_the_range(H200, 32, "bfloat16", "mask")
    assert rows[0]["constants"] == {}
    as_assumed = predict(H200, 32, "bfloat16", "mask")["sum_ms"]
    assert rows[0]["built_ms"] == pytest.approx(as_assumed)
    ranges = planner().cuda_cost_ranges()
    assert set(ranges) == {"line_share", "barrier", "skew"}
    assert all(least < MODEL[name] < most for name, (least, most) in ranges.items())
    ends = {(name, value) for name, values in ranges.items() for value in values}
    assert ends <= {tuple(item) for row in rows for item in row["constants"].items()}
    best, worst = rows[-2], rows[-1]
    assert worst["constants"] == {
        "line_share": ranges["line_share"][0],
        "barrier": ranges["barrier"][1],
        "skew": ranges["skew"][1],
    }
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
            "site": row["site"], "batch": 256, "dtype": "bfloat16",
            "peer": "ours_mask" if row["site"].endswith(" bn_add_relu") else "ours",
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
    # Without a residual there is no mask, so a time serves both.
    document = command.main(["--measured", str(path), "--save", "y"])
    assert document["sites"][0]["measured_us"] == first["measured_us"]
    assert site(document, "7x7x2048 bn_add_relu")["measured_us"] is None
    with pytest.raises(SystemExit, match="no time of jax_bnar at batch 64 in bfloat16: measure"):
        command.main(["--measured", str(path), "--batch", "64"])


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
