"""What must hold in programs that XLA compiles for GPUs, and programs in which it does not hold.

The programs are compiled for GPUs that are not there, and nothing runs. Each fact has a second
program that breaks it, so that a check that sees nothing would fail.
"""

import functools
import json
from typing import Any

import compiled_programs
import gpu_compiler
import pytest

from jax_bnar._kernels.convolution_layout import puts_channels_first

pytestmark = [pytest.mark.slow, pytest.mark.one_python]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    gpu_compiler.require()


@functools.cache
def results(*names: str) -> dict[str, Any]:
    """What functions of tests/support/compiled_programs.py return, by their names."""
    code = f"import compiled_programs\ncompiled_programs.main(*{names!r})\n"
    return json.loads(gpu_compiler.run_with_gpu_compiler(code, timeout=600))


def on_one_device() -> dict[str, Any]:
    return results("on_one_device", "transposed_before", "in_pure_jax")


def on_eight_devices() -> dict[str, Any]:
    return results("on_eight_devices", "accurate_flax_on_eight_devices", "gathered_after")


def one_call_each_way(*, has_two_inputs: bool) -> list[str]:
    prefix = "dual_" if has_two_inputs else ""
    return [f"jax_bnar_{prefix}{direction}_v1" for direction in ("forward", "backward")]


def test_no_activation_is_copied_or_transposed() -> None:
    found = on_one_device()["on_one_device"]
    dtypes, layouts, saves = (
        compiled_programs.DTYPES,
        compiled_programs.LAYOUTS,
        compiled_programs.SAVES,
    )
    assert len(found) == 3 * len(dtypes) * len(layouts) * len(saves)
    assert {name: facts["copies"] for name, facts in found.items() if facts["copies"]} == {}
    assert len(on_one_device()["transposed_before"]["copies"]) >= 2


def test_forward_and_backward_are_one_call_each() -> None:
    for name, facts in on_one_device()["on_one_device"].items():
        assert facts["calls"] == one_call_each_way(has_two_inputs=name.startswith("dual")), name
    assert on_one_device()["in_pure_jax"]["calls"] == []


def test_other_activations_are_calls_like_relu() -> None:
    found = results("other_activations")["other_activations"]
    assert len(found) == 25
    sharded = found.pop("eight devices")
    assert sharded["collectives"] == ["all-reduce", "all-reduce"]
    assert sharded["copies"] == []
    for name, facts in found.items():
        assert facts["calls"] == one_call_each_way(has_two_inputs=" input " in name), name
        assert facts["copies"] == [], name


def test_out_dtype_makes_no_wide_copy_of_x() -> None:
    """Without a kernel for it, XLA widens x where it reads it; a kernel needs x and dx widened."""
    found = results("widened")["widened"]
    ours, before = found["out_dtype"], found["widened before"]
    assert ours["calls"] == []
    assert ours["temporary_bytes"] < ours["elements"] // 8
    assert before["calls"] == ["jax_bnar_forward_v1", "jax_bnar_backward_v1"]
    assert before["temporary_bytes"] >= 8 * before["elements"]


def test_devices_exchange_one_all_reduce_each_way_and_nothing_else() -> None:
    found = on_eight_devices()
    for name, facts in found["on_eight_devices"].items():
        assert facts["collectives"] == ["all-reduce", "all-reduce"], name
        assert facts["copies"] == [], name
    assert found["accurate_flax_on_eight_devices"]["collectives"].count("all-reduce") > 2
    assert "all-gather" in found["gathered_after"]["collectives"]


def test_our_calls_are_recorded_in_command_buffers() -> None:
    found = results("command_buffers", "call_that_may_not_be_recorded")
    for name, calls in found["command_buffers"].items():
        assert calls == {"inside": 2, "outside": 0}, name
    assert found["call_that_may_not_be_recorded"] == {"inside": 2, "outside": 1}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_step_moves_much_less_than_plain_flax(dtype: str) -> None:
    rows = results(f"steps_{dtype}")[f"steps_{dtype}"]
    moved = {name: row["bytes_outside_convolutions"] for name, row in rows.items()}
    assert moved["ours"] <= 0.65 * moved["flax"]
    assert rows["ours"]["activation_copies"] == 0
    # 49 places, of which 4 join two BatchNorms.
    assert rows["ours"]["calls"] == {
        "jax_bnar_forward_v1": 45,
        "jax_bnar_backward_v1": 45,
        "jax_bnar_dual_forward_v1": 4,
        "jax_bnar_dual_backward_v1": 4,
    }
    if dtype == "bfloat16":
        # The same formulas without our calls.
        assert moved["ours_xla"] > 0.65 * moved["flax"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_frozen_norms_move_no_more_than_plain_flax(dtype: str) -> None:
    """Kernels move 1.7 times as much there, because they neither fuse nor do without x."""
    rows = results("frozen", "frozen_with_kernels")
    ours, flax, kernels = (
        row["bytes_outside_convolutions"]
        for row in (
            rows["frozen"]["ours"][dtype],
            rows["frozen"]["flax"][dtype],
            rows["frozen_with_kernels"][dtype],
        )
    )
    assert ours <= flax < kernels


def test_masked_norms_move_no_more_than_plain_flax() -> None:
    """A kernel would need the selected elements in memory, once for each of two passes."""
    rows = results("masked", "masked_with_kernels")
    ours, flax = rows["masked"]["ours"], rows["masked"]["flax"]
    assert ours <= 1.01 * flax
    assert rows["masked_with_kernels"]["ours"] > 1.3 * flax


def test_a_hessian_vector_product_reads_arrays_once_for_two_sums() -> None:
    """Its sums are pairs, like those of backward. XLA stores what single sums have in common."""
    rows = results("hessian_vector_product", "hessian_vector_product_with_single_sums")
    ours, flax = rows["hessian_vector_product"]["ours"], rows["hessian_vector_product"]["flax"]
    single = rows["hessian_vector_product_with_single_sums"]["ours"]
    assert ours <= 1.5 * flax, rows
    assert single > 1.2 * ours, rows


def test_convolutions_have_the_layout_that_is_expected() -> None:
    for found in results("convolution_layouts")["convolution_layouts"]:
        major, minor = map(int, found["capability"].split("."))
        expected = puts_channels_first((major, minor), found["dtype"], found["axes"])
        assert found["channels_first"] == expected, found


def test_calls_among_convolutions_transpose_nothing() -> None:
    """Plain Flax transposes its arguments and results there, and with our calls one more at most.

    Where each call's arrays are transposed, there are five more.
    """
    for name, (flax, ours) in results("among_convolutions")["among_convolutions"].items():
        assert ours["copies"] <= flax["copies"] + 1, name
        # Across devices, statistics are calls of their own, which read x once more.
        assert "8 devices" in name or ours["bytes"] < 0.9 * flax["bytes"], name
