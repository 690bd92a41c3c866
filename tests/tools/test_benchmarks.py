"""Smoke tests of benchmarks/: the sites are those of ResNet-50, and PyTorch is not required."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkout import ROOT
from subprocesses import run_python
from tiers import slow_except

for _package in ("flax", "matplotlib", "rich", "tyro"):
    pytest.importorskip(_package)

from flax import linen as nn  # noqa: E402

import jax_bnar  # noqa: E402
from benchmarks.common import isa  # noqa: E402
from benchmarks.common.allocator import describe_allocator  # noqa: E402
from benchmarks.common.sites import (  # noqa: E402
    RESNET50_SITES,
    Form,
    Site,
    two_read_bytes,
    two_read_bytes_without_y,
)
from benchmarks.models.small import ConvNorm  # noqa: E402
from benchmarks.network import folded_inference, small_pictures  # noqa: E402
from benchmarks.sharding import collective_bytes  # noqa: E402
from benchmarks.sites import (  # noqa: E402
    activations,
    dual_join,
    instance_norm,
    launch,
    masked,
    measure,
    page_faults,
    plot,
    sizes,
    widening,
)
from benchmarks.sites import run as sites_run  # noqa: E402
from benchmarks.sites.problem import DType  # noqa: E402
from jax_bnar._benchmark.timing import interleave  # noqa: E402
from jax_bnar._kernels import targets  # noqa: E402

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("few_objects_to_collect")]


@pytest.fixture
def default_promotion():
    """Benchmarks run with JAX's default promotion; Flax does not work with strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _count(form: str) -> int:
    return sum(site.count for site in RESNET50_SITES if site.form == form)


def test_sites_are_those_of_resnet50():
    assert sum(site.count for site in RESNET50_SITES) == 53
    assert _count("bn_relu") + _count("bn_add_relu") == 49
    assert _count("bn_add_relu") == 16
    assert _count("batch_norm") == 4
    assert len({site.label for site in RESNET50_SITES}) == len(RESNET50_SITES) == 16


def test_sites_have_the_parameters_of_resnet50():
    # The number of scales and biases of all BatchNorms in torchvision's resnet50.
    assert sum(2 * site.count * site.channels for site in RESNET50_SITES) == 53_120


def test_stride_sits_in_the_3x3_convolution():
    assert Site(56, 56, 128, "bn_relu", 1) in RESNET50_SITES
    assert Site(28, 28, 128, "bn_relu", 7) in RESNET50_SITES
    assert RESNET50_SITES[0] == Site(112, 112, 64, "bn_relu", 1)


def test_bytes_of_the_two_read_scheme():
    elements = 2 * 7 * 7 * 8
    expected_passes: dict[Form, tuple[int, int]] = {
        "bn_relu": (10, 8),
        "bn_add_relu": (11, 10),
        "batch_norm": (8, 8),
    }
    for form, (passes, passes_without_y) in expected_passes.items():
        site = Site(7, 7, 8, form)
        assert two_read_bytes(site, 2, 4) == passes * elements * 4
        assert two_read_bytes_without_y(site, 2, 2) == passes_without_y * elements * 2
    step = sum(site.count * two_read_bytes_without_y(site, 16, 4) for site in RESNET50_SITES)
    assert step / 45e9 == pytest.approx(0.143, rel=0.01)


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("dtype", slow_except({"bfloat16"}, ["float32", "bfloat16", "float16"]))
def test_quick_run_measures_every_form_and_plots(dtype: DType, tmp_path: Path):
    output = tmp_path / "quick.json"
    sites_run.main(["--quick", "--dtype", dtype, "--output", str(output)])

    document = json.loads(output.read_text())
    (run,) = document["runs"]
    assert run["dtype"] == dtype
    assert {site["form"] for site in run["sites"]} == {"bn_relu", "bn_add_relu", "batch_norm"}
    for site in run["sites"]:
        assert set(site["peers"]) == {"ours", "flax"}
        assert all(min(peer["samples_ms"]) > 0 for peer in site["peers"].values())
    ours = [site["count"] * site["peers"]["ours"]["median_ms"] for site in run["sites"]]
    assert run["step"]["peers"]["ours"]["median_ms"] == pytest.approx(sum(ours))
    assert run["step"]["copy_bytes_per_s"] > 0
    assert document["environment"]["allocator"]["name"] in ("default", "jemalloc")

    picture = tmp_path / "quick.png"
    plot.plot(document, picture)
    assert picture.stat().st_size > 0


def test_only_peers_measured_at_all_sites_have_a_sum():
    def row(**times: float) -> dict[str, Any]:
        timings = {name: {"median_ms": time, "min_ms": time} for name, time in times.items()}
        common = {"count": 2, "copy_bytes_per_s": 1e9, "unavailable": {}}
        missing = {"unavailable": {} if "torch" in times else {"torch": "why"}}
        bytes_moved = {"two_read_bytes": 8, "two_read_bytes_without_y": 8}
        return {**common, **missing, **bytes_moved, "peers": timings}

    step = measure.sum_up([row(ours=1.0, torch=2.0), row(ours=3.0)])
    assert step["peers"] == {"ours": {"median_ms": 8.0, "min_ms": 8.0}}
    assert step["unavailable"] == {"torch": "why"}
    step = measure.sum_up([row(ours=1.0, torch=2.0), row(ours=3.0, torch=1.0)])
    assert step["peers"]["torch"]["median_ms"] == 6.0
    assert step["unavailable"] == {}


def test_unknown_site_is_refused():
    with pytest.raises(ValueError, match="matches none of: 112x112x64"):
        sites_run.main(["--quick", "--sites", "1x1x1"])


def test_steps_take_turns(monkeypatch):
    monkeypatch.setattr("jax_bnar._benchmark.timing._SETTLE_SECONDS", 0)
    calls = []
    timings = interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=3,
        min_sample_ms=0,
        each_round=lambda: calls.append("|"),
    )
    # A round consists of an untimed and a timed call of each, in rotating order.
    assert "".join(calls).split("|")[1:] == ["aabb", "bbaa", "aabb"]
    assert [len(timing.samples_ms) for timing in timings.values()] == [3, 3]


IN_A_NEW_PROCESS = f"import sys\nsys.path.append({str(ROOT)!r})\n"


@pytest.mark.slow
def test_isa_limits_all_peers(tmp_path: Path):
    output = tmp_path / "baseline.json"
    printed = run_python(
        f"""
        import os
        from benchmarks.sites import run
        short = ["--quick", "--dtype", "float32", "--sites", "7x7x512", "--peers", "ours"]
        run.main([*short, "--isa", "baseline", "--output", {str(output)!r}])
        print(os.environ["ATEN_CPU_CAPABILITY"], os.environ["ONEDNN_MAX_CPU_ISA"])
        """,
        timeout=120,
        prelude=IN_A_NEW_PROCESS + "import os\nos.environ['XLA_FLAGS'] = '--xla_dump_to='\n",
    )
    assert "ours: baseline, XLA: at most" in " ".join(printed.split())
    assert printed.endswith("default SSE41\n")
    document = json.loads(output.read_text())
    assert document["settings"]["isa"] == "baseline"
    assert document["environment"]["jax_bnar_isa"] == "baseline"
    assert document["environment"]["xla_max_isa"] == "SSE4_2"


def test_isa_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_BNAR_CPU_ISA", "")
    with pytest.raises(SystemExit, match=r"already run with .*; start a new process"):
        isa.limit("avx512" if targets.cpu_isa() == "baseline" else "baseline")

    def cpu_isa() -> str:
        raise ValueError("of which this processor runs 'baseline'; got 'avx512'.")

    monkeypatch.setattr(targets, "cpu_isa", cpu_isa)
    with pytest.raises(SystemExit, match=r"--isa avx512: .* this processor runs 'baseline'"):
        isa.limit("avx512")


def test_launcher_names_outputs_after_the_allocator():
    assert launch.options_for("jemalloc", ["--output", "r/a.json", "--quick"]) == [
        "--output",
        "r/a-jemalloc.json",
        "--quick",
    ]
    assert launch.options_for("default", ["--output=r/a.json"]) == ["--output=r/a-default.json"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")
def test_launcher_preloads_jemalloc():
    environment = launch.environment_for("jemalloc", {"LD_PRELOAD": "a.so"}, "libjemalloc.so.2")
    assert environment["LD_PRELOAD"] == "libjemalloc.so.2:a.so"
    assert "dirty_decay_ms:-1" in environment["MALLOC_CONF"]
    with pytest.raises(SystemExit, match="apt install libjemalloc2"):
        launch.environment_for("jemalloc", {}, None)


def test_launcher_leaves_the_default_allocator_as_it_is():
    given = {
        "LD_PRELOAD": "/lib/libjemalloc.so.2:a.so",
        "MALLOC_CONF": "narenas:1",
        "MALLOC_ARENA_MAX": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "HOME": "/home/me",
    }
    environment = launch.environment_for("default", given, None)
    assert environment == {"LD_PRELOAD": "a.so", "HOME": "/home/me"}


def test_settings_of_the_default_allocator_are_recorded(monkeypatch: pytest.MonkeyPatch):
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    if describe_allocator()["name"] != "default":
        pytest.skip("the tests run with jemalloc")
    without = describe_allocator()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert describe_allocator() == without | {"glibc": {"MALLOC_ARENA_MAX": "1"}}


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_folded_inference(tmp_path: Path):
    output = tmp_path / "folded.json"
    short = ["--rounds", "1", "--min-sample-ms", "1", "--output", str(output)]
    small = ["--dtype", "bfloat16", "--batch", "2", "--size", "32", "--stage-sizes", "1"]
    folded_inference.main([*small, *short])
    (run,) = json.loads(output.read_text())["runs"]
    assert list(run["networks"]) == ["flax", "ours", "folded", "folded, xla"]
    for row in run["networks"].values():
        assert row["median_ms"] > 0
        assert row["argument_bytes"] > row["temporary_bytes"] / 100 > 0
        assert 0 < row["distance"] < 0.05


@pytest.mark.slow
def test_dual_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "dual.json"
    short = ["--rounds", "1", "--min-sample-ms", "1", "--output", str(output)]
    dual_join.main(["--dtype", "float32", "--batch", "1", "--sites", "1", *short])
    runs = json.loads(output.read_text())["runs"]
    assert [(run["site"], run["save"]) for run in runs] == [
        ("56x56x256", "y"),
        ("56x56x256", "mask"),
    ]
    for run in runs:
        forms = ("inference", "forward", "step")
        assert list(run["programs"]) == [f"{f}, {name}" for name in ("one", "two") for f in forms]
        assert all(row["min_processor_ms"] > 0 for row in run["programs"].values())
        # `two` has the normalised x2 as an array of its own.
        one, two = (run["programs"][f"forward, {name}"] for name in ("one", "two"))
        assert two["temporary_bytes"] - one["temporary_bytes"] >= 4 * 56 * 56 * 256
    assert "56x56x256" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and Flax's results agree, which the benchmark checks itself."""
    output = tmp_path / "activations.json"
    short = ["--rounds", "1", "--min-sample-ms", "1", "--output", str(output)]
    activations.main(["--batch", "1", "--sites", "1", "--peers", "ours", "flax", *short])
    runs = json.loads(output.read_text())["runs"]
    assert [(run["network"], run["dtype"]) for run in runs] == [
        (name, dtype) for name in activations.NETWORKS for dtype in ("float32", "bfloat16")
    ]
    for run in runs:
        (site,) = run["sites"]
        ours, flax = (site["peers"][peer]["median_ms"] for peer in ("ours", "flax"))
        assert run["total_ms"] == {"ours": site["count"] * ours, "flax": site["count"] * flax}
    assert "yolov8n" in capsys.readouterr().out

    small = ["--networks", "mobilenet_v3_large", "--batch", "1", "--sites", "1"]
    (run, _) = activations.main([*small, "--peers", "flax", *short])["runs"]
    assert set(run["total_ms"]) == {"flax"}


def test_sizes_without_jax_bnar() -> None:
    size = {
        part: {name: {"median_ms": ms} for name, ms in (("flax", 0.25), ("torch", 0.5))}
        for part in ("forward", "step")
    }
    run = {"dtype": "float32", "sizes": [size | {"shape": [32, 16]}]}
    table = sizes.table(run)
    assert [list(column.cells) for column in table.columns] == [["32x16"], *([["-"]] * 6)]
    with pytest.raises(SystemExit, match="--smallest 4 is too small"):
        sizes.main(["--smallest", "4"])


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_widening(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results are those of the problem, which the benchmark checks itself."""
    output = tmp_path / "widening.json"
    short = ["--rounds", "1", "--min-sample-ms", "1", "--output", str(output)]
    widening.main(["--batch", "1", "--sites", "1", *short])
    (run,) = json.loads(output.read_text())["runs"]
    (site,) = run["sites"]
    assert set(site["peers"]) == set(widening.PEERS)
    memory = {peer: values["temporary_bytes"] for peer, values in site["peers"].items()}
    assert memory["out_dtype"] < 1000 < memory["widened"]
    assert "bfloat16 to float32" in capsys.readouterr().out

    widening.main(["--rounded", "--batch", "1", "--sites", "1", *short])
    ((site,),) = (run["sites"] for run in json.loads(output.read_text())["runs"])
    memory = {peer: values["temporary_bytes"] for peer, values in site["peers"].items()}
    assert set(memory) == set(widening.ROUNDED_PEERS)
    assert memory["fuse"] < 1000 < memory["out_dtype"]


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results are those of Flax, which the benchmark checks itself."""
    output = tmp_path / "masked.json"
    short = ["--rounds", "1", "--min-sample-ms", "1", "--output", str(output)]
    masked.main(["--batch", "2", "--frames", "8", "--models", "small", *short])
    runs = json.loads(output.read_text())["runs"]
    assert [run["dtype"] for run in runs] == ["float32", "bfloat16"]
    assert {tuple(run["peers"]) for run in runs} == {masked.PEERS}
    assert "2 rows of 4 to 8 frames" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_instance_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results are those of Flax, which the benchmark checks itself."""
    output = tmp_path / "instance_norm.json"
    short = ["--rounds", "1", "--min-sample-ms", "1", "--output", str(output)]
    instance_norm.main(["--divide-sizes", "8", "--peers", "fuse", "flax", *short])
    runs = json.loads(output.read_text())["runs"]
    assert [len(run["sites"]) for run in runs] == [3, 3, 5, 5]
    assert {tuple(run["total_ms"]) for run in runs} == {("fuse", "flax")}
    assert "act(instance_norm(x))" in capsys.readouterr().out


def test_norms_of_the_networks_with_other_activations() -> None:
    """EfficientNet-B0 has 33 norms before SiLU, and MobileNetV3 20 before hard swish."""
    counts = {name: sum(own.sites.values()) for name, own in activations.NETWORKS.items()}
    assert counts == {"efficientnet_b0": 33, "mobilenet_v3_large": 20, "yolov8n": 57}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "fused"),
    [
        ("ResNet-18", 11_181_642, {"bn_relu": 9, "bn_add_relu": 5, "dual_bn_add_relu": 3}),
        ("MobileNetV2", 2_236_682, {"bn_act": 45, "batch_norm": 7}),
    ],
)
def test_small_networks_are_those_of_torchvision(
    name: str, parameters: int, fused: dict[str, int]
) -> None:
    """They have torchvision's parameters, with ten classes, and `fuse` finds every norm."""
    net = small_pictures.NETWORKS[name](small_stem=False)
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == parameters

    def apply(variables: Any, images: Any) -> Any:
        return net.apply(variables, images, mutable=["batch_stats"])

    report = jax_bnar.explain(apply)(variables, images)
    assert {operator: report.count(operator) for operator in fused} == fused


class _OneNorm(nn.Module):
    small_stem: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = ConvNorm(8, 3, activation=nn.relu, dtype=self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(y.mean((1, 2)))


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_small_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two losses agree, which the benchmark checks itself."""
    monkeypatch.setitem(small_pictures.NETWORKS, "one norm", _OneNorm)
    output = tmp_path / "small.json"
    small = ["--networks", "one norm", "--sizes", "8", "2", "--rounds", "1"]
    document = small_pictures.main([*small, "--output", str(output)])
    assert json.loads(output.read_text()) == document
    assert [run["dtype"] for run in document["runs"]] == ["float32", "bfloat16"]
    for run in document["runs"]:
        assert len(run["fused"]["samples_ms"]) == len(run["plain"]["samples_ms"]) == 1


def test_table_of_collective_bytes() -> None:
    """Pins the communication of Flax, so that the published comparison stays true.

    With its fast variance, E[x^2]-E[x]^2, Flax has five sums in two all-reduces after XLA combines
    them. With the variance that does not cancel it has six sums in four dependent all-reduces: as
    many bytes as ours, in twice as many steps.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = {
            name: collective_bytes.of_site(make(), 24)
            for name, make in collective_bytes.PEERS.items()
        }
    assert found == {
        "jax_bnar": (2, 24 * 24),
        "Flax": (2, 20 * 24),
        "Flax, use_fast_variance=False": (4, 24 * 24),
    }
    # A training step of ResNet-50 therefore sends 24 bytes for each of 26560 BatchNorm channels.
    assert sum(site.count * site.channels for site in RESNET50_SITES) == 26560


@pytest.mark.slow
def test_refused_without_kernels() -> None:
    """Pure JAX under the name of the kernels would be a measurement of something else."""
    output = run_python(
        """
        import importlib
        commands = {
            "sites.run": ["--quick"],
            "network.resnet50_step": [],
            "network.folded_inference": [],
            "network.fused_models": [],
            "network.small_pictures": [],
        }
        for command, arguments in commands.items():
            program = importlib.import_module(f"benchmarks.{command}")
            try:
                program.main(arguments)
            except SystemExit as refused:
                print(refused)
            else:
                raise AssertionError(f"{command} ran")
        """,
        timeout=120,
        prelude=f"{IN_A_NEW_PROCESS}sys.modules['jax_bnar._native'] = None\n",
    )
    assert output.count("jax_bnar would run in pure JAX here: ") == 5
    assert output.count("pip install") >= 5


@pytest.mark.slow
def test_page_faults(tmp_path: Path) -> None:
    if not targets.huge_pages():
        with pytest.raises(SystemExit, match="no huge pages on request"):
            page_faults.main([])
        return
    output = tmp_path / "faults.json"
    few = ["--dtype", "float32", "--batch", "2", "--sites", "1", "--calls", "2", "--processes", "1"]
    page_faults.main([*few, "--output", str(output)])
    (run,) = json.loads(output.read_text())["runs"]
    (site,) = run["sites"]
    assert site["site"] == "112x112x64 bn_relu"
    assert site["count"] == 1
    for setting in ("0", "1"):
        assert site[setting]["ms"] > 0
        assert site[setting]["faults"] >= 0
        assert run["step"][setting] == site[setting]
