"""`jax_bnar.benchmark`: what it measures, what it prints and draws, and what it refuses."""

import contextlib
import functools
import gc
import json
import pathlib
import re
import sys
import xml.etree.ElementTree
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from subprocesses import run_python

import jax_bnar
from jax_bnar._benchmark import timing

pytestmark = pytest.mark.usefixtures("few_objects_to_collect")

SHORT: Any = {"rounds": 2, "min_sample_ms": 0.0, "progress": False}


@pytest.fixture(autouse=True)
def as_users_run_jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def block(x: jax.Array, z: jax.Array, scale: jax.Array) -> jax.Array:
    """relu(batch_norm(x) + z) in plain JAX."""
    mean = x.mean((0, 1, 2))
    var = x.var((0, 1, 2))
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + z)


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    x, z = (jax.random.normal(key, (4, 8, 8, 16), jnp.float32) for key in keys)
    return x, z, jnp.ones(16, jnp.float32)


@pytest.fixture(scope="module")
def report() -> jax_bnar.BenchmarkReport:
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(timing, "_SETTLE_SECONDS", 0)
        return jax_bnar.benchmark(block, **SHORT)(*operands())


def test_plain_and_fused_are_measured(report: jax_bnar.BenchmarkReport) -> None:
    named = {(m.name, m.what): m for m in report.measurements}
    forward, both = "forward", "forward + backward"
    assert set(named) == {(n, w) for n in ("plain", "fused") for w in (forward, both)}
    assert all(len(m.samples_ms) == 2 and min(m.samples_ms) > 0 for m in report.measurements)
    assert (report.matched, report.refused) == (1, 0)
    assert 0 < report.difference < 1e-4  # two programs, and the same function
    x = operands()[0]
    fused = named["fused", both]
    # Backward reads y, which is a result here, and the statistics; x is an argument.
    assert fused.residual_bytes is not None
    assert x.nbytes <= fused.residual_bytes < 1.2 * x.nbytes
    plain = named["plain", both]
    assert plain.residual_bytes is not None
    assert plain.residual_bytes > 1.5 * x.nbytes
    assert named["fused", forward].residual_bytes is None
    assert fused.peak_bytes is not None
    assert fused.peak_bytes >= 6 * x.nbytes  # x, z, dy, y, dx, dz
    assert report.speedup(both) == plain.median_ms / fused.median_ms
    with pytest.raises(ValueError, match="'backward' was not measured; measured were 'forward', "):
        report.speedup("backward")


def test_the_table_is_whole_at_80_columns(report: jax_bnar.BenchmarkReport) -> None:
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("block on ")
    assert re.split("  +", lines[1].strip()) == [
        "median ms",
        "min ms",
        "peak MiB",
        "temp MiB",
        "resid. MiB",
    ]
    assert [line.strip().split()[0] for line in lines[2:]] == (
        ["forward", "plain", "fused", "fused"] * 2
        + ["results", "most", "by", "gradients", "most", "by", "fused:"]
    )
    assert repr(report) == str(report)
    assert lines[-1] == "fused: 1 place; refused: 0 (explain says why)"


def test_a_notebook_shows_a_table(report: jax_bnar.BenchmarkReport) -> None:
    shown = report._repr_html_()
    table = xml.etree.ElementTree.fromstring(shown)  # raises unless elements are closed
    assert table.find(".//caption") is not None
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert [row[:2] for row in rows[1:]] == [[m.what, m.name] for m in report.measurements]
    assert rows[1][2] == f"{report.measurements[0].median_ms:.4g}"
    assert "fused: 1 place; refused: 0" in shown
    assert f"fused is {report.speedup('forward'):.2f} times as fast" in shown


def test_values_and_picture(report: jax_bnar.BenchmarkReport, tmp_path: pathlib.Path) -> None:
    values = json.loads(json.dumps(report.to_json()))
    assert values["measurements"][0]["name"] == "plain"
    assert report.plot(tmp_path / "block.png").stat().st_size > 5000
    assert "<svg" in report.plot(str(tmp_path / "block.svg")).read_text()


def test_progress_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {**SHORT, "progress": True, "gradient": False}
    found = jax_bnar.benchmark(block, **given)(*operands())
    assert {m.what for m in found.measurements} == {"forward"}
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "jax_bnar.benchmark: compiling forward, plain",
        "jax_bnar.benchmark: compiling forward, fused",
        "jax_bnar.benchmark: timing forward, 2 rounds",
    ]


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        return nn.relu(nn.BatchNorm(use_running_average=not train)(x)).mean()


def test_a_network_with_labels_flags_and_state() -> None:
    """Integers are no operands of backward, flags are constants, further results may be trees."""
    net = Network()
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3), jnp.float32)
    variables = net.init(jax.random.key(1), images, False)

    def loss(variables: Any, data: Any, train: bool) -> Any:
        value, updated = net.apply(variables, data["images"], train, mutable=["batch_stats"])
        return value * data["labels"].sum(), updated, data["labels"]

    data = {"labels": np.arange(1, 3, dtype=np.int32), "images": images}
    found = jax_bnar.benchmark(loss, **SHORT)(variables, data, train=True)
    assert found.matched == 1
    assert found.difference < 1e-4


def test_another_function_to_compare_with() -> None:
    def fused(x: jax.Array, z: jax.Array, scale: jax.Array) -> jax.Array:
        return jax_bnar.bn_add_relu(x, z, scale, None).y

    found = jax_bnar.benchmark(block, fused=fused, **SHORT)(*operands())
    assert found.matched is None
    assert "place" not in str(found)
    assert found.difference < 1e-4
    with pytest.raises(ValueError, match="the two functions do not compute the same"):
        jax_bnar.benchmark(block, fused=lambda x, z, s: x[:1], **SHORT)(*operands())
    with pytest.raises(ValueError, match=r"their dtypes are \['float32'\] and \['bool'\]"):
        jax_bnar.benchmark(block, fused=lambda x, z, s: x > 0, **SHORT)(*operands())


def test_a_function_that_rounds_to_another_dtype() -> None:
    def rounded(*given: jax.Array) -> jax.Array:
        return block(*given).astype(jnp.bfloat16)

    found = jax_bnar.benchmark(block, fused=rounded, **SHORT)(*operands())
    assert [each.what for each in found.differences] == ["results", "gradients"]
    assert 2**-12 < found.difference < 2**-7


def test_a_gradient_that_is_zero_is_no_difference() -> None:
    """A bias in front of a BatchNorm has a gradient of rounding errors alone."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return block(x * parameters["scale"] + parameters["bias"], x, x[0, 0, 0]).sum()

    x = operands()[0]
    parameters = {"bias": jnp.ones(16, jnp.float32), "scale": jnp.ones(16, jnp.float32)}
    found = jax_bnar.benchmark(loss, **SHORT)(parameters, x)
    gradients = [jax.grad(function)(parameters, x) for function in (loss, jax_bnar.fuse(loss))]
    apart, size = (
        np.linalg.norm(each["bias"])
        for each in (jax.tree.map(jnp.subtract, *gradients), gradients[0])
    )
    assert apart > 0.1 * size  # Relative to its own norm, it would be a large difference.
    assert found.difference < 1e-5
    assert [each.what for each in found.differences] == ["results", "gradients"]


def test_the_worst_array_is_named() -> None:
    def other(parameters: Any, x: jax.Array, z: jax.Array) -> Any:
        return {"y": parameters["a"] * x, "z": z + 1e-3}

    def plain(parameters: Any, x: jax.Array, z: jax.Array) -> Any:
        return {"y": parameters["a"] * x + 0 * parameters["b"], "z": z}

    a = {"a": jnp.float32(2), "b": jnp.float32(2)}
    x, z = jnp.full(4, 3, jnp.float32), jnp.full((2, 2), 0.5, jnp.float32)
    results, gradients = jax_bnar.benchmark(plain, fused=other, **SHORT)(a, x, z).differences
    assert results.worst == "z"
    assert results.norm == pytest.approx(np.sqrt(4 * 36 + 1))
    assert results.relative == pytest.approx(2e-3 / results.norm, rel=1e-3)
    assert (results.worst_difference, results.worst_norm) == pytest.approx((2e-3, 1), rel=1e-3)
    assert gradients.relative == 0

    def nan(parameters: Any, x: jax.Array, z: jax.Array) -> Any:
        return {"y": plain(parameters, x, z)["y"], "z": z.at[0, 0].set(jnp.nan)}

    found = jax_bnar.benchmark(plain, fused=nan, gradient=False, **SHORT)(a, x, z)
    assert found.difference == np.inf
    same = jax_bnar.benchmark(nan, fused=nan, gradient=False, **SHORT)(a, x, z)
    assert same.difference == 0


def test_a_long_path_is_cut() -> None:
    def plain(x: jax.Array) -> Any:
        return {"a" * 60: {"b" * 60: x}}

    x = jnp.ones(4, jnp.float32)
    found = jax_bnar.benchmark(plain, fused=lambda x: [x + 1], **SHORT)(x)
    lines = str(found).splitlines()
    assert max(map(len, lines)) == 80
    assert any(line.endswith("b" * 40) for line in lines)


@pytest.mark.slow
def test_one_interrupt_ends_it() -> None:
    """Python drops what is raised in a callback of the garbage collector, such as JAX's own."""
    printed = run_python(
        """
        import gc, signal
        import jax.numpy as jnp, jax_bnar

        # A shell starts background jobs with interrupts ignored, and processes inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt(phase, info):
            gc.callbacks.remove(interrupt)
            signal.raise_signal(signal.SIGINT)

        gc.disable()  # The benchmark itself collects garbage before it measures.
        gc.callbacks.append(interrupt)
        try:
            jax_bnar.benchmark(jnp.sin, rounds=1, min_sample_ms=0)(jnp.ones(4))
        except KeyboardInterrupt:
            print("interrupted", interrupt not in gc.callbacks)
        """,
        timeout=120,
        prelude="",
    )
    assert printed == "interrupted True\n"


def test_the_garbage_collector_stays_as_it_was() -> None:
    was_enabled = gc.isenabled()
    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            jax_bnar.benchmark(jnp.sin, **SHORT)(jnp.ones(8, jnp.float32))
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_results_that_are_no_arrays() -> None:
    """A string, and a number of Python, which counts."""
    x = jnp.ones(8, jnp.float32)
    found = jax_bnar.benchmark(lambda x: {"name": "sin", "y": jnp.sin(x), "two": 2.0}, **SHORT)(x)
    assert [each.relative for each in found.differences] == [0, 0]


def test_progress_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    full = pathlib.Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    with full.open("w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        found = jax_bnar.benchmark(jnp.sin, **SHORT | {"progress": True})(jnp.ones(8, jnp.float32))
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stream.close()
    assert found.difference == 0


def test_nothing_to_fuse_is_said() -> None:
    found = jax_bnar.benchmark(lambda x: jnp.sin(x), **SHORT)(jnp.ones(8, jnp.float32))
    assert found.matched == 0
    assert found.difference == 0
    assert "NOTHING was fused: jax_bnar.explain(fun)(*args) says why" in str(found)
    assert "times as fast" not in str(found)
    with pytest.raises(ValueError, match="nothing was fused, so both programs are the same"):
        found.speedup("forward")


def refuse(kind: type[Exception], sentence: str, fun: Any, *given: Any, **options: Any) -> None:
    with pytest.raises(kind, match=sentence):
        jax_bnar.benchmark(fun, **{**SHORT, **options})(*given)


def test_refusals() -> None:
    x = jnp.ones((4, 8), jnp.float32)
    refuse(TypeError, "fun must be callable, got ", jnp.sin(x), x)
    refuse(TypeError, "fused must be callable, got int", jnp.sin, x, fused=3)
    refuse(TypeError, r"there is no array .*benchmark\(fun\)\(\*args\)", jnp.sin)
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    refuse(TypeError, r"it needs arrays; got ShapeDtypeStruct.*jax_bnar.explain", jnp.sin, shape)
    refuse(ValueError, "rounds must be at least 1, got 0", jnp.sin, x, rounds=0)
    refuse(TypeError, "rounds must be an int, got '3'", jnp.sin, x, rounds="3")
    refuse(TypeError, "rounds must be an int, got 2.5", jnp.sin, x, rounds=2.5)
    refuse(TypeError, "rounds must be an int, got True", jnp.sin, x, rounds=True)
    for wrong in (-1, float("nan"), float("inf")):
        words = f"min_sample_ms must be finite and at least 0, got {wrong}"
        refuse(ValueError, words, jnp.sin, x, min_sample_ms=wrong)
    refuse(TypeError, "min_sample_ms must be a number, got '3'", jnp.sin, x, min_sample_ms="3")
    integers = jnp.arange(4)
    refuse(ValueError, "none of the arguments is a floating-point array", jnp.sin, integers)
    refuse(ValueError, "none of the results is a floating-point array", jnp.argmax, x)
    assert jax_bnar.benchmark(jnp.argmax, gradient=False, **SHORT)(x).difference == 0
    gradient = jax.grad(lambda *given: block(*given).sum())
    words = r"benchmark: fun contains the gradient.*benchmark\(loss\).*grad\(fuse\("
    refuse(ValueError, words, gradient, *operands())
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    refuse(TypeError, r"nnx\.split\(model\)", lambda m, x: m(x), model, x)
    refuse(TypeError, r"nnx\.split\(model\)", lambda m, x: m["net"](x), {"net": model}, x)


def test_an_nnx_module_that_was_split() -> None:
    model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def apply(state: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(nnx.merge(graphdef, state)(x))

    assert jax_bnar.benchmark(apply, **SHORT)(state, operands()[0]).matched == 1


def test_a_function_without_a_name() -> None:
    found = jax_bnar.benchmark(functools.partial(block), gradient=False, **SHORT)(*operands())
    assert found.function == "partial"


@pytest.mark.slow
def test_without_kernels_it_says_so() -> None:
    printed = run_python(
        """
        import os, sys
        os.environ["JAX_BNAR_IMPLEMENTATION"] = "xla"
        sys.modules["jax_bnar._native"] = None
        import jax, jax.numpy as jnp, jax_bnar
        measure = jax_bnar.benchmark(jnp.sin, rounds=1, min_sample_ms=0, progress=False)
        print(measure(jnp.ones(4)))
        """,
        timeout=120,
        prelude="",
    )
    assert "NO KERNELS for this platform in this build" in printed
