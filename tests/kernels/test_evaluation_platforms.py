"""Evaluation runs the kernel on CPUs and is left to XLA elsewhere.

The platform that counts is the one that a program is lowered for, and not the one of the machine
that traces it. Programs for CUDA that call no kernel also run on a CPU, where they are compared
with the oracle.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import gpu_compiler
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, as_dtype, cotangents, operands
from flax_tools import as_flax_needs_it
from jax import export
from jax.sharding import PartitionSpec as P
from programs import ours
from sharding_tools import make_mesh, put, use_mesh

import jax_bnar
from jax_bnar import flax_layers, fuse
from jax_bnar._operators.folded import bias_act

SHAPE, C = (8, 5, 6, 32), 32
X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
V = jax.ShapeDtypeStruct((C,), jnp.float32)
FORMS: dict[str, tuple[Callable[..., jax.Array], int, int]] = {
    # name: the function, how many arrays and how many vectors it takes
    "bn_relu": (jax_bnar.bn_relu_inference, 1, 4),
    "bn_add_relu": (jax_bnar.bn_add_relu_inference, 2, 4),
    "batch_norm": (jax_bnar.batch_norm_inference, 1, 4),
    "dual": (jax_bnar.dual_bn_add_relu_inference, 2, 8),
    "folded": (functools.partial(bias_act, activation="relu"), 2, 1),
}
forms = pytest.mark.parametrize("form", FORMS)


def calls(traced: Any, *platforms: str) -> list[str]:
    text = traced.lower(lowering_platforms=platforms).as_text()
    return re.findall(r"custom_call @jax_bnar_(\w+)_v1", text)


def traced(form: str, **options: Any) -> Any:
    function, arrays, vectors = FORMS[form]
    return jax.jit(functools.partial(function, **options)).trace(*[X] * arrays, *[V] * vectors)


@forms
def test_one_trace_is_lowered_for_each_platform(form: str) -> None:
    kernel = "dual_normalise" if form == "dual" else "normalise"
    program = traced(form)
    assert calls(program, "cpu") == [kernel]
    assert calls(program, "cuda") == []
    assert calls(program, "tpu") == []
    # XLA chooses between the branches when it runs the program.
    assert calls(program, "cpu", "cuda") == [kernel]
    assert "stablehlo.case" in program.lower(lowering_platforms=("cpu", "cuda")).as_text()


@forms
def test_an_implementation_that_is_asked_for(form: str) -> None:
    kernel = "dual_normalise" if form == "dual" else "normalise"
    assert calls(traced(form, implementation="ffi"), "cuda") == [kernel]
    for platform in ("cpu", "cuda"):
        assert calls(traced(form, implementation="xla"), platform) == []


def test_masks_are_written_by_the_kernel() -> None:
    """oneDNN's workspace, which XLA would need another pass for."""

    def forward(x: Any, mean: Any, var: Any, one: Any) -> Any:
        return jax_bnar.ops.batch_norm_forward_training(
            *(x, mean, var, one, one),
            epsilon=1e-5,
            use_global_stats=True,
            fuse_norm_relu=True,
        )

    assert calls(jax.jit(forward).trace(X, V, V, V), "cuda") == ["normalise"]


def test_backward_is_left_to_xla_where_forward_is() -> None:
    def loss(implementation: Any, *given: Any) -> jax.Array:
        return jax_bnar.bn_relu_inference(*given, implementation=implementation).sum()

    def program(implementation: Any) -> Any:
        function = functools.partial(loss, implementation)
        return jax.jit(jax.grad(function, (0, 1, 2))).trace(X, V, V, V, V)

    kernels = ["backward_apply", "backward_reduce"]
    assert calls(program(None), "cuda") == []
    assert sorted(calls(program("ffi"), "cuda")) == [*kernels, "normalise"]
    assert sorted(calls(program(None), "cpu")) == [*kernels, "normalise"]


def test_training_is_as_it_was() -> None:
    program = jax.jit(lambda x, v: jax_bnar.bn_relu(x, v, v).y).trace(X, V)
    assert calls(program, "cuda") == calls(program, "cpu") == ["forward"]


def exported(function: Any, *given: Any, platforms: tuple[str, ...] = ("cuda",)) -> Any:
    """The function, as a program for these platforms, which runs on any."""
    checks = [export.DisabledSafetyCheck.platform(), *jax_bnar.DISABLED_EXPORT_CHECKS]
    return export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(*given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_left_to_xla_it_computes_the_same(dtype: str, axis: int) -> None:
    case = Case((6, 8, 7, 9), axis, dtype)
    x, z, scale, bias = operands(case)
    mean, var = np.abs(np.stack(cotangents(case)[1:]))
    given = tuple(map(jnp.asarray, (x, z, scale, bias, mean, var)))
    options: dict[str, Any] = {"epsilon": case.epsilon, "axis": axis}
    program = exported(functools.partial(jax_bnar.bn_add_relu_inference, **options), *given)
    assert "custom_call @jax_bnar" not in program.mlir_module()
    expected, allowance = oracle.inference(x, z, scale, bias, mean, var, **options)
    if dtype in ("bfloat16", "float16"):
        # The normalised array is rounded before z is added.
        normalised = np.abs(expected) + np.abs(np.asarray(z, np.float64))
        allowance = allowance + oracle.rounding(normalised, dtype)
    oracle.assert_within("y", program.call(*given), expected, allowance)

    mapped = exported(
        jax.vmap(functools.partial(jax_bnar.bn_add_relu_inference, **options), (0, 0, *[None] * 4)),
        *(jnp.stack([each, each]) for each in given[:2]),
        *given[2:],
    )
    both = mapped.call(*(jnp.stack([each, each]) for each in given[:2]), *given[2:])
    np.testing.assert_array_equal(both[0], both[1])
    oracle.assert_within("y", both[1], expected, allowance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_left_to_xla(dtype: str, axis: int, frozen: bool) -> None:
    case = Case((6, 8, 7, 9), axis, dtype)
    x, z, *affine = operands(case)
    dy, *given_statistics = cotangents(case)
    mean, var = np.abs(np.stack(given_statistics))
    options: dict[str, Any] = {"epsilon": case.epsilon, "axis": axis}
    operator = functools.partial(jax_bnar.bn_add_relu_inference, **options)
    given = tuple(map(jnp.asarray, (x, z, *affine, mean, var)))

    def both(dy: jax.Array, *given: jax.Array) -> Any:
        wanted, others = (given[:2], given[2:]) if frozen else (given, ())
        y, pullback = jax.vjp(lambda *wanted: operator(*wanted, *others), *wanted)
        return y, pullback(dy)

    program = exported(both, dy, *given)
    assert "custom_call @jax_bnar" not in program.mlir_module()
    # Gradients follow the side of the jump on which the rounded y is.
    y, actual = program.call(dy, *given)
    expected = oracle.inference_backward(dy, x, y, affine[0], mean, var, **options)
    rows = zip(actual, expected.gradients, expected.allowances, strict=False)
    for i, (gradient, exact, allowance) in enumerate(rows):
        allowance = allowance + oracle.rounding(exact, gradient.dtype)
        oracle.assert_within(str(i), gradient, exact, allowance)
    assert len(actual) == (2 if frozen else 6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("offset", [0, 300])
def test_statistics_of_selected_elements_left_to_xla(dtype: str, offset: float) -> None:
    """XLA sums the elements where it selects them; a kernel would have them stored twice before."""
    random = np.random.default_rng(0)
    where = random.random((64, 5, 1)) < 0.6
    x = as_dtype(random.normal(size=(64, 5, 9)) + offset, dtype)
    x = np.where(where, x, np.asarray(np.nan, x.dtype))

    def both(x: jax.Array, where: jax.Array) -> Any:
        statistics, pullback = jax.vjp(lambda x: jax_bnar.batch_statistics(x, where=where), x)
        return statistics, pullback(jax.tree.map(jnp.ones_like, statistics))

    given = jnp.asarray(x), jnp.asarray(where)
    traced = jax.jit(both).trace(*given)
    assert calls(traced, "cuda") == []
    assert calls(traced, "cpu") == ["statistics", "statistics"]
    (mean, var), (dx,) = exported(both, *given).call(*given)
    wide = np.where(where, np.asarray(x, np.float64), np.nan).reshape(-1, 9)
    count = np.isfinite(wide).sum(0)
    exact_mean, exact_var = np.nanmean(wide, 0), np.nanvar(wide, 0)
    eps = oracle.unit_roundoff(mean.dtype)
    np.testing.assert_allclose(mean, exact_mean, rtol=8 * eps, atol=8 * eps)
    np.testing.assert_allclose(var, exact_var, rtol=40 * eps)
    exact_dx = np.where(where, 1 / count + 2 * (np.asarray(x, np.float64) - exact_mean) / count, 0)
    # The mean is rounded before it is subtracted, here and, in float64, by NumPy.
    of_mean = 16 * eps * offset / count.min()
    atol = of_mean + 4 * oracle.unit_roundoff(dx.dtype) * np.abs(exact_dx).max()
    np.testing.assert_allclose(np.asarray(dx, np.float64), exact_dx, rtol=0, atol=atol)


def test_two_inputs_left_to_xla() -> None:
    (x1, z, *affine), dout = operands(Case(SHAPE)), cotangents(Case(SHAPE))
    mean, var = np.abs(np.stack(dout[1:]))
    given = (x1, z, *affine, *affine, mean, var, mean, var)
    program = exported(jax_bnar.dual_bn_add_relu_inference, *given)
    expected = jax.jit(jax_bnar.dual_bn_add_relu_inference)(*given)
    np.testing.assert_allclose(program.call(*given), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_folded_bias_left_to_xla(dtype: str) -> None:
    x, z, _, bias = operands(Case(SHAPE, dtype=dtype))
    function = functools.partial(bias_act, activation="relu")
    wide = [np.broadcast_to(np.asarray(each, np.float64), SHAPE) for each in (x, z, bias)]
    expected = np.maximum(np.sum(wide, 0), 0)
    magnitude = np.abs(wide).sum(0)
    allowance = 3 * oracle.unit_roundoff(jnp.dtype(dtype)) * magnitude
    oracle.assert_within("y", exported(function, x, z, bias).call(x, z, bias), expected, allowance)


def test_one_file_for_both_platforms_runs_the_kernel_here() -> None:
    x, _, scale, bias = operands(Case(SHAPE))
    given = (x, scale, bias, bias, np.abs(scale))
    program = exported(jax_bnar.bn_relu_inference, *given, platforms=("cpu", "cuda"))
    assert program.mlir_module().count("@jax_bnar_normalise_v1") == 1
    np.testing.assert_array_equal(program.call(*given), jax.jit(jax_bnar.bn_relu_inference)(*given))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("form", ["bn_add_relu", "dual", "folded"])
def test_sharded_arrays_stay_where_they_are(form: str, kind: Any) -> None:
    """XLA partitions what it computes itself; without our calls there is nothing to wait for."""
    function, arrays, vectors = FORMS[form]
    mesh = make_mesh(kind, d=8)
    x, _, scale, _ = operands(Case(SHAPE))
    given = (*[put(x, mesh, P("d"))] * arrays, *[put(np.abs(scale), mesh, P())] * vectors)
    with use_mesh(mesh):
        program = jax.jit(function).trace(*given)
        assert calls(program, "cuda") == []
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert "CustomSPMDPartitioning" not in text
        left = exported(function, *given)
        y = jax.jit(left.call)(*given)
        expected = jax.jit(function)(*given)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)
    assert y.sharding.is_equivalent_to(given[0].sharding, y.ndim)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fuse_decides_the_same_for_every_platform(dtype: str) -> None:
    """In 16-bit types, no platform gains by fusing evaluation."""

    def evaluate(x: Any, mean: Any, var: Any) -> jax.Array:
        a = jax.lax.rsqrt(var + 1e-5)
        return jax.nn.relu(((x - mean) * a).astype(x.dtype))

    x = jax.ShapeDtypeStruct(SHAPE, dtype)
    vector = jax.ShapeDtypeStruct((1, 1, 1, C), dtype)
    with jax.numpy_rank_promotion("allow"):
        program = jax.jit(fuse(evaluate)).trace(x, vector, vector)
        found = ours(fuse(evaluate), x, vector, vector)
    assert found == ({"inference": 1} if dtype == "float32" else {})
    assert calls(program, "cuda") == []
    assert calls(program, "cpu") == (["normalise"] if dtype == "float32" else [])


FOLDED = """
from jax_bnar import flax_layers

target = SingleDeviceSharding(h200s(1)[0])
for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    net = flax_layers.ResNet(stage_sizes=(2, 1), num_classes=10, num_filters=64, dtype=dtype)
    x = jax.ShapeDtypeStruct((8, 64, 64, 3), dtype, sharding=target)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), variables)
    folded, variables = flax_layers.fold_batch_norms(net, variables)
    variables = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=target), variables
    )
    step = jax.jit(lambda v, x: folded.apply(v, x, train=False))
    text = step.lower(variables, x).compile().as_text()
    targets = re.findall(r'custom_call_target="([^"]+)"', text)
    print(targets.count("__cudnn$convBiasActivationForward"), "jax_bnar" in "".join(targets))
"""


@pytest.mark.slow
def test_folded_convolutions_are_single_calls_of_cudnn() -> None:
    """All but those of the two shortcuts, which have neither bias nor ReLU of their own."""
    gpu_compiler.require()
    printed = gpu_compiler.run_with_gpu_compiler(FOLDED, timeout=300)
    assert printed.splitlines() == ["10 False"] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_decide_when_they_are_lowered(dtype: str) -> None:
    with as_flax_needs_it():
        net = flax_layers.ResNet((1, 1), 5, num_filters=4, dtype=jnp.dtype(dtype))
        images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.dtype(dtype))
        variables = jax.eval_shape(net.init, jax.random.key(0), images)
        program = jax.jit(lambda v, x: net.apply(v, x, train=False)).trace(variables, images)
    assert calls(program, "cuda") == []
    # The stem, two in each block, and the joins of both shortcuts.
    assert sorted(calls(program, "cpu")) == ["dual_normalise"] * 2 + ["normalise"] * 5
