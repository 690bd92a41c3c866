"""Tests how hardware counters are read: ncu's table, its units, and which site a kernel is of."""

import re

import pytest
from checkout import ROOT
from ncu_output import FORWARD, launched, site, table

from benchmarks.common.sites import RESNET50_SITES, one_read_bytes
from benchmarks.gpu import counter_rows, ncu_csv

# A table as ncu 2024.2 writes it; the last line is truncated, and some numbers have separators.
TABLE = """\
==PROF== Connected to process 41645 (/usr/bin/python3.12)
==PROF== Profiling "ForwardKernel" - 0: 0%....50%....100% - 6 passes
==WARNING== Could not deploy stock section files, but, "well".

"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","device__attribute_display_name","dram__bytes_read.sum",\
"gpu__time_duration.sum","launch__shared_mem_per_block","lts__t_sector_hit_rate.pct"
"","","","","","","","","","","","","byte","ns","byte/block","%"
"0","41645","python3.12","127.0.0.1","void jax_bnar::cuda::ForwardKernel<__nv_bfloat16, (int)8, \
(int)2>(jax_bnar::cuda::ForwardParameters)","1","7","(256, 1, 1)","(264, 1, 1)","0","9.0",\
"NVIDIA H200","1,234,567","66432","115712","53.83"
"1","41645","python3.12","127.0.0.1","loop_add_fusion(float *, const float *)","1","7",\
"(128, 1, 1)","(8, 2, 1)","0","9.0","NVIDIA H200","512","1000","0","n/a"
==PROF== Disconnected from process 41645
"2","41645","python3.12","127.0.0.1","void jax_bnar::cuda::BackwardKernel<__nv_bfloat16, (int)8>(\
jax_bnar::cuda::BackwardParameters)","1","7","(256, 1, 1)","(264, 1, 1)","0","9.0","NVIDIA H200",\
"2,345,678","70000","115712","4"""


def test_table() -> None:
    forward, other = ncu_csv.parse(TABLE)
    assert forward.function == "ForwardKernel"
    assert forward.signature.startswith("void jax_bnar::cuda::ForwardKernel<__nv_bfloat16, (int)8")
    assert (forward.grid, forward.block) == ((264, 1, 1), (256, 1, 1))
    assert forward.metrics == pytest.approx(
        {
            "dram__bytes_read.sum": 1_234_567,
            "gpu__time_duration.sum": 66.432e-6,
            "launch__shared_mem_per_block": 115_712,
            "lts__t_sector_hit_rate.pct": 53.83,
        }
    )
    assert (other.function, other.grid) == ("loop_add_fusion", (8, 2, 1))
    assert "lts__t_sector_hit_rate.pct" not in other.metrics


def test_units_that_ncu_chose_itself() -> None:
    chosen = (
        TABLE.replace('"byte","ns"', '"Mbyte","us"')
        .replace('"1,234,567","66432"', '"1.234567","66.432"')
        .replace('"byte/block"', '"Kbyte/block"')
        .replace('"115712"', '"115.712"')
    )
    assert ncu_csv.parse(chosen)[0].metrics == pytest.approx(ncu_csv.parse(TABLE)[0].metrics)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no line of names"):
        ncu_csv.parse("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    without_units = "".join(line for line in TABLE.splitlines(True) if not line.startswith('""'))
    with pytest.raises(ValueError, match="units was expected"):
        ncu_csv.parse(without_units)
    with pytest.raises(ValueError, match="no column Grid Size"):
        ncu_csv.parse(TABLE.replace("Grid Size", "Grid"))


def test_kernels_go_to_their_sites() -> None:
    kernels = ncu_csv.parse(
        table(
            launched("ForwardKernel", **FORWARD),
            ("loop_add_fusion(float *)", {}),
            launched("BackwardKernel"),
            launched("StatisticsKernel"),
            launched("NormaliseKernel"),
            launched("ReduceKernel"),
            launched("ApplyKernel"),
        )
    )
    sites = [
        site("a", Backward__cluster=1, Forward__on_chip=1),
        site(
            "b", BackwardApply__two_kernels=1, BackwardReduce__two_kernels=1,
            Normalise__two_kernels=1, Statistics__two_kernels=1,
        ),
    ]  # fmt: skip
    rows, problems = counter_rows.make_rows(sites, kernels)
    assert problems == []
    assert [(row["site"], row["pass"], row["kernel"], row["strategy"]) for row in rows] == [
        ("a", "forward", "ForwardKernel", "on_chip"),
        ("a", "backward", "BackwardKernel", "cluster"),
        ("b", "forward", "StatisticsKernel", "two_kernels"),
        ("b", "forward", "NormaliseKernel", "two_kernels"),
        ("b", "backward", "ReduceKernel", "two_kernels"),
        ("b", "backward", "ApplyKernel", "two_kernels"),
    ]
    first = rows[0]
    assert first["milliseconds"] == pytest.approx(0.2)
    assert first["dram_bytes"] == 1e9
    assert first["dram_bytes_over_minimum"] == pytest.approx(2)
    assert first["dram_bytes_over_planned"] == pytest.approx(1.25)
    assert first["planned_bytes_again"] == 100_000_000
    assert first["l2_bytes_hit"] == 32 * 7
    # Two kernels share what is planned for the pass.
    assert [row["dram_bytes_over_planned"] is None for row in rows] == [False] * 2 + [True] * 4
    assert first["bytes_per_s"] == pytest.approx(5e12)
    assert (first["grid"], first["block"]) == ([264, 1, 1], [256, 1, 1])
    assert first["registers_per_thread"] == 7
    # Metrics that the table leaves at 7 come between these.
    assert next(iter(first["stalls"].items())) == ("long_scoreboard", 12.25)
    assert list(first["stalls"].items())[-2:] == [("barrier", 3.1), ("wait", 1.5)]
    text = list(counter_rows.summarise(rows))
    assert len(text) == 7
    assert text[1].split()[:6] == ["0.200", "2.00", "1.25", "5000", "a", "ForwardKernel"]
    assert "long_scoreboard 12.2" in text[1]


def test_a_kernel_without_counters_does_not_shift_the_others() -> None:
    kernels = ncu_csv.parse(
        table(
            launched("ForwardKernel", **FORWARD),
            launched("ForwardKernel"),
            launched("BackwardKernel"),
            launched("ApplyKernel"),
        )
    )
    step = {"Forward__cluster": 1, "Backward__cluster": 1}
    rows, problems = counter_rows.make_rows([site("a", **step), site("b", **step)], kernels)
    assert [(row["site"], row["kernel"], "dram_bytes" in row) for row in rows] == [
        ("a", "ForwardKernel", True),
        ("a", "BackwardKernel", False),
        ("b", "ForwardKernel", True),
        ("b", "BackwardKernel", True),
        (None, "ApplyKernel", True),
    ]
    assert rows[0]["dram_bytes"] == 1e9
    assert problems == [
        "a: ncu has no counters of BackwardKernel, but ForwardKernel follows",
        "the program launched 1 fewer of our kernels than ncu has",
        "so it is not certain which site the counters belong to",
    ]
    assert len(list(counter_rows.summarise(rows))) == 6


def test_a_metric_without_value() -> None:
    values = {**FORWARD, "gpu__time_duration.sum": "n/a", "dram__bytes_write.sum": ""}
    kernels = ncu_csv.parse(table(launched("ForwardKernel", **values)))
    (row,), problems = counter_rows.make_rows([site("a", Forward__cluster=1)], kernels)
    assert problems == []
    assert (row["milliseconds"], row["dram_bytes"], row["bytes_per_s"]) == (None, None, None)
    assert row["dram_bytes_over_minimum"] is None
    assert row["dram_bytes_read"] == 600_000_000


def test_names_of_the_kernels_are_those_of_the_sources() -> None:
    counts = (ROOT / "cuda" / "launch" / "launch_counts.cc").read_text()
    listed = re.search(r"kKernelNames\[\] = \{(.*?)\}", counts, re.DOTALL)
    assert listed is not None
    assert re.findall(r'"(\w+)"', listed[1]) == list(counter_rows.KERNELS)
    headers = "".join(path.read_text() for path in (ROOT / "cuda" / "device").glob("*.cuh"))
    defined = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", headers)
    assert set(defined) == {function for function, _ in counter_rows.KERNELS.values()}


def test_minimum_of_both_passes_is_that_of_the_step() -> None:
    for of in RESNET50_SITES:
        for itemsize in (2, 4):
            passes = counter_rows.minimum_bytes(of, 32, itemsize)
            assert sum(passes.values()) == one_read_bytes(of, 32, itemsize)
            assert passes["backward"] - passes["forward"] == of.elements(32) * itemsize
