"""What is counted in programs compiled for GPUs, by hand; what is committed; what is printed."""

import dataclasses
import functools
import io
import itertools
import json
import re
from typing import Any

import jax
import pytest
from checkout import ROOT
from rich.console import Console

for _package in ("flax", "matplotlib", "optax", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.common.hlo_text import layout_changes  # noqa: E402
from benchmarks.common.sites import RESNET50_SITES  # noqa: E402
from benchmarks.gpu.compiled import __main__ as command  # noqa: E402
from benchmarks.gpu.compiled import compiler, sites, targets  # noqa: E402
from benchmarks.gpu.compiled.count import KINDS, kernels  # noqa: E402
from benchmarks.gpu.compiled.programs import NORMS, PROGRAMS, build  # noqa: E402
from benchmarks.gpu.compiled.selection import default_cases  # noqa: E402
from benchmarks.gpu.compiled.table import print_rows  # noqa: E402
from benchmarks.gpu.model import flax as flax_model  # noqa: E402
from benchmarks.gpu.model.devices import DEVICES  # noqa: E402

pytestmark = pytest.mark.one_python

RESULTS = ROOT / "benchmarks" / "results"

# What XLA:GPU prints, shortened: a convolution, our call, a reduction, a loop that needs a row of a
# large array, a copy, a product of matrices, a loop of three turns and a collective.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused_slice (param_0: f32[1024,64]) -> f32[1,64] {
  %param_0 = f32[1024,64]{1,0} parameter(0)
  ROOT %slice = f32[1,64]{1,0} slice(%param_0), slice={[0:1], [0:64]}
}

%fused_reduce (param_0.1: bf16[8,4,4,64]) -> f32[64] {
  %param_0.1 = bf16[8,4,4,64]{3,2,1,0} parameter(0)
  %convert = f32[8,4,4,64]{3,2,1,0} convert(%param_0.1)
  %zero = f32[] constant(0)
  ROOT %reduce = f32[64]{0} reduce(%convert, %zero), dimensions={0,1,2}, to_apply=%sum
}

%fused_transpose (param_0.2: bf16[8,4,4,64]) -> bf16[64,8,4,4] {
  %param_0.2 = bf16[8,4,4,64]{3,2,1,0} parameter(0)
  ROOT %transpose = bf16[64,8,4,4]{3,2,1,0} transpose(%param_0.2), dimensions={3,0,1,2}
}

%gemm (param_0.3: f32[8,16], param_1: f32[16,4]) -> f32[8,4] {
  %param_0.3 = f32[8,16]{1,0} parameter(0)
  %param_1 = f32[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%param_0.3, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (f32[32])) -> (f32[32]) {
  %state = (f32[32]{0}) parameter(0)
  %part = f32[32]{0} get-tuple-element(%state), index=0
  %twice = f32[32]{0} fusion(%part), kind=kLoop, calls=%fused_twice
  ROOT %next = (f32[32]{0}) tuple(%twice)
}

ENTRY %main (x: bf16[8,4,4,64], w: bf16[3,3,64,64], table: f32[1024,64], a: f32[8,16], b: f32[16,4], v: f32[32]) -> f32[64] {
  %x = bf16[8,4,4,64]{3,2,1,0} parameter(0)
  %w = bf16[3,3,64,64]{3,2,1,0} parameter(1)
  %table = f32[1024,64]{1,0} parameter(2)
  %a = f32[8,16]{1,0} parameter(3)
  %b = f32[16,4]{1,0} parameter(4)
  %v = f32[32]{0} parameter(5)
  %conv = (bf16[8,4,4,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %gte = bf16[8,4,4,64]{3,2,1,0} get-tuple-element(%conv), index=0
  %flat = bf16[128,64]{1,0} bitcast(%gte)
  %call = (bf16[8192]{0}, f32[1,64]{1,0}, f32[1,64]{1,0}) custom-call(%flat, %flat), custom_call_target="jax_bnar_forward_v1", api_version=API_VERSION_TYPED_FFI
  %y = bf16[8192]{0} get-tuple-element(%call), index=0, metadata={op_name="index=7"}
  %y4 = bf16[8,4,4,64]{3,2,1,0} bitcast(%y)
  %sums = f32[64]{0} fusion(%y4), kind=kInput, calls=%fused_reduce
  %row = f32[1,64]{1,0} fusion(%table), kind=kLoop, calls=%fused_slice
  %turned = bf16[64,8,4,4]{3,2,1,0} fusion(%y4), kind=kLoop, calls=%fused_transpose
  %copy = bf16[3,3,64,64]{2,3,1,0} copy(%w)
  %product = f32[8,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm
  %start = (f32[32]{0}) tuple(%v)
  %loop = (f32[32]{0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %reduce-start = f32[64]{0} all-reduce-start(%sums), channel_id=1, to_apply=%sum
  ROOT %reduce-done = f32[64]{0} all-reduce-done(%reduce-start)
}
"""  # noqa: E501


def test_kernels_are_what_one_counts_by_hand() -> None:
    found = [
        (kernel.kind, kernel.target, kernel.nbytes, kernel.times) for kernel in kernels(PROGRAM)
    ]
    activation, weights = 8 * 4 * 4 * 64 * 2, 3 * 3 * 64 * 64 * 2
    assert found == [
        ("convolution", "__cudnn$convForward", 2 * activation + weights, 1),
        # The same array twice is read once.
        ("ours", "jax_bnar_forward_v1", 2 * activation + 2 * 64 * 4, 1),
        ("fusion", "fusion", activation + 64 * 4, 1),
        # Of the table, only one row is read.
        ("fusion", "fusion", 2 * 64 * 4, 1),
        ("fusion", "fusion", 2 * activation, 1),
        ("copy", "copy", 2 * weights, 1),
        ("library", "fusion", (8 * 16 + 16 * 4 + 8 * 4) * 4, 1),
        ("fusion", "fusion", 2 * 32 * 4, 3),
    ]


def test_what_the_kernel_before_has_touched() -> None:
    found = kernels(PROGRAM)
    activation = 8 * 4 * 4 * 64 * 2
    after = [kernel.after(before) for before, kernel in itertools.pairwise(found)]
    # Our call reads what the convolution wrote, the sums read what our call wrote.
    assert after == [activation, activation, 0, 0, 0, 0, 0]


def test_vectors_in_between_leave_the_cache_as_it_is() -> None:
    found = kernels(PROGRAM)
    rows = sites.with_reuse(found, large=20_000)
    assert [row["bytes"] for row in rows] == [kernel.nbytes for kernel in found]
    activation = 8 * 4 * 4 * 64 * 2
    # The sums moved 16 KB, so the transposition still finds the result of our call.
    assert [row["after"] for row in rows] == [0, activation, activation, 0, activation, 0, 0, 0]


def test_copies_of_activations_are_found_in_fusions_and_those_of_weights_are_not() -> None:
    (line,) = layout_changes(PROGRAM, 8192, {3 * 3 * 64 * 64})
    assert "transpose(" in line
    assert len(layout_changes(PROGRAM, 8192)) == 2
    assert layout_changes(PROGRAM, 8193, {3 * 3 * 64 * 64}) == []


@pytest.mark.parametrize(
    ("number", "expected"), [(1, "1x1x1"), (8, "1x1x8"), (64, "1x8x8"), (1024, "1x128x8")]
)
def test_topologies_are_hosts_of_eight(number: int, expected: str) -> None:
    assert targets.topology(number) == expected


def spec_of(gpu: targets.GpuName) -> dict[str, str]:
    return dict(re.findall(r"(\w+): (\S+)", targets.target_config(gpu)))


@pytest.mark.parametrize("gpu", [gpu for gpu in targets.GPUS if gpu in DEVICES])
def test_the_compiler_and_the_model_have_the_same_gpus(gpu: Any) -> None:
    spec, device = spec_of(gpu), DEVICES[gpu]
    assert int(spec["core_count"]) == device.multiprocessors
    assert int(spec["shared_memory_per_core"]) == device.shared_kib * 1024
    assert int(spec["major"]) == device.compute_capability // 10
    assert float(spec["clock_rate_ghz"]) == device.clock_ghz
    assert int(spec["memory_bandwidth"]) / 1e6 == pytest.approx(device.bytes_per_us, rel=0.03)


def test_the_guide_describes_the_same_h200() -> None:
    page = (ROOT / "docs" / "guide" / "ahead_of_time.md").read_text()
    assert f'H200 = """\n{targets.target_config("h200")}"""' in page


def test_options_select() -> None:
    assert command.Options().cases() == default_cases()
    cases = command.Options(gpu=("b200",), dtype=("f32",), devices=(1, 8), batch=2).cases()
    assert {case.gpu for case in cases} == {"b200"}
    assert {(case.program, case.dtype, case.batch) for case in cases} == {("step", "float32", 2)}
    assert [(case.devices, case.variant) for case in cases] == [
        (1, "ours"), (1, "flax"), (8, "ours"), (8, "flax"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--devices", "12"], "12 GPUs: give at most 8, or a multiple of 8"),
        (
            ["--program", "block", "--variant", "flax_remat"],
            "flax_remat of the program block; leave it out, or give flax",
        ),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command.main(arguments)


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "WHEELS", ("jax-cuda99-plugin",))
    with pytest.raises(SystemExit, match=r"jax-cuda99-plugin is not installed: pip install"):
        command.main(["--program", "operator"])


@pytest.mark.parametrize("name", ["block", "operator", "frozen", "volumes"])
@pytest.mark.parametrize("variant", NORMS)
def test_programs_differ_in_nothing_but_the_batch_norm(name: Any, variant: Any) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        results = [
            jax.eval_shape(program.function, program.whole, program.divided)
            for program in (build(name, each, "bfloat16", 2) for each in (variant, "flax"))
        ]
    ours, flax = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(r)] for r in results)
    assert sorted(ours, key=str) == sorted(flax, key=str)


@functools.cache
def committed() -> dict[str, Any]:
    return json.loads((RESULTS / "gpu-compiled.json").read_text())


def test_the_default_table_is_committed() -> None:
    fields = [field.name for field in dataclasses.fields(default_cases()[0])]
    rows = [{name: row[name] for name in fields} for row in committed()["rows"]]
    assert rows == [dataclasses.asdict(case) for case in default_cases()], (
        "commit what `python -m benchmarks.gpu.compiled.write` and `make figures` write"
    )
    assert {row["program"] for row in rows} == set(PROGRAMS)
    assert {row["gpu"] for row in rows} == set(targets.GPUS)
    environment = committed()["environment"]
    assert environment["commit"]
    assert set(environment["compiler"]) >= set(compiler.WHEELS)


def test_the_documentation_has_the_numbers() -> None:
    titles = {
        "flax": "plain Flax",
        "ours": "jax_bnar",
        "ours_remat": "jax_bnar with the policy",
        "flax_remat": "plain Flax with the policy",
        "ours_xla": 'jax_bnar in pure JAX (`implementation="xla"`)',
    }
    steps = {
        (row["variant"], row["dtype"]): row
        for row in committed()["rows"]
        if (row["program"], row["gpu"], row["devices"]) == ("step", "h200", 1)
    }
    text = (ROOT / "docs" / "performance.md").read_text()
    for variant, title in titles.items():
        both = [steps[variant, dtype] for dtype in ("bfloat16", "float32")]
        moved = [f"{row['bytes_outside_convolutions'] / 1e9:.1f}" for row in both]
        peaks = [f"{row['peak_bytes'] / 2**20:.0f}" for row in both]
        assert f"| {' | '.join([title, *moved, *peaks])} |" in text


def test_the_readme_has_the_numbers() -> None:
    wanted = {"program": "step", "dtype": "bfloat16", "gpu": "h200", "devices": 1}
    rows = {row["variant"]: row for row in committed()["rows"] if wanted.items() <= row.items()}
    ours, remat, flax = (rows[variant] for variant in ("ours", "ours_remat", "flax"))
    gigabytes = [f"{r['bytes_outside_convolutions'] / 1e9:.0f} GB" for r in (ours, remat, flax)]
    peaks = [f"{r['peak_bytes'] / 2**30:.1f} GiB" for r in (ours, remat, flax)]
    text = (ROOT / "README.md").read_text()
    assert f"| bytes moved | **{gigabytes[0]}** | {' | '.join(gigabytes[1:])} |" in text
    assert f"| peak memory | {peaks[0]} | **{peaks[1]}** | {peaks[2]} |" in text


def test_the_sites_are_committed() -> None:
    document = json.loads(sites.RESULTS.read_text())
    assert [(run["batch"], run["dtype"]) for run in document["runs"]] == sites.cases()
    for run in document["runs"]:
        assert [site["site"] for site in run["sites"]] == [site.label for site in RESNET50_SITES]
        for site in run["sites"]:
            assert all(each["after"] <= each["bytes"] for each in site["kernels"])


def test_the_table_fits_and_says_that_nothing_ran() -> None:
    printed = io.StringIO()
    print_rows(committed()["rows"], Console(file=printed, width=80))
    assert "…" not in printed.getvalue()
    assert printed.getvalue().count("COMPILED, not run") >= 10
    assert max(map(len, printed.getvalue().splitlines())) <= 80
    assert set(committed()["rows"][0]["kernels"]) == set(KINDS)


def test_plain_flax_is_what_one_computes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels, of which the second finds 30 MiB of its operand in L2, which has 60."""
    mib = 2**20
    run = {
        "gpu": "h200",
        "batch": 256,
        "dtype": "bfloat16",
        "sites": [
            {
                "site": "7x7x512 bn_relu",
                "count": 5,
                "kernels": [
                    {"bytes": 100 * mib, "after": 0},
                    {"bytes": 80 * mib, "after": 50 * mib},
                ],
            }
        ],
    }
    monkeypatch.setattr(flax_model, "_runs", lambda: [run])
    model = {"share_of_l2": 0.5, "kernel": 1.5}
    h200 = DEVICES["h200"]
    (site,) = flax_model.predict(h200, 256, "bfloat16", 1e6, model).values()
    assert site == {"kernels": 2, "bytes": 150 * mib, "predicted_us": 150 * mib / 1e6 + 3}
    assert flax_model.predict(h200, 32, "bfloat16", 1e6, model) == {}
    assert flax_model.predict(DEVICES["a100"], 256, "bfloat16", 1e6, model) == {}
    assert flax_model.sum_ms([{"count": 5, "flax": site}]) == 5 * site["predicted_us"] / 1e3
    assert flax_model.sum_ms([{"count": 5, "flax": site}, {"count": 1, "flax": None}]) is None
