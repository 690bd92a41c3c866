"""Programs of which `fuse` takes only the statistics: they become `batch_statistics`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_tools import array, assert_fused, assert_no_worse, assert_untouched, kernels, operators
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from property_tests import example_count
from test_fuse_mutations import ARGUMENTS as OF_MUTANTS
from test_fuse_mutations import BASES, MUTATIONS, mutant, require_equal

import jax_bnar
from jax_bnar._fuse import statistics_search

AXES = (0, 1, 2)
X, G = array((16, 8, 8, 8)), array((16, 8, 8, 8), 1)
SCALE = array((1, 1, 1, 8), 2)
SIZE = X.size * 4


def _moments(x: Any, axes: Any = AXES) -> tuple[jax.Array, jax.Array]:
    return x.mean(axes, keepdims=True), x.var(axes, keepdims=True)


def _fast_moments(x: Any) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES, keepdims=True)
    squares = jnp.square(x).mean(AXES, keepdims=True)
    return mean, jnp.maximum(0, squares - mean * mean)


def _gated(x: Any, g: Any, mean: Any, var: Any) -> jax.Array:
    return jax.nn.relu((x - mean) * (lax.rsqrt(var + 1e-3) * jax.nn.sigmoid(g)))


def gate(x: Any, g: Any, scale: Any) -> Any:
    return _gated(x, g, *_moments(x))


def gate_by_fast_statistics(x: Any, g: Any, scale: Any) -> Any:
    return _gated(x, g, *_fast_moments(x))


def gate_in_slope_and_offset(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    slope = scale * lax.rsqrt(var + 1e-3) * jax.nn.sigmoid(g)
    return x * slope - mean * slope


def scale_chosen_for_each_element(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    return (x - mean) * (jnp.where(g > 0, scale, 2 * scale) * lax.rsqrt(var + 1e-3))


def stopped(x: Any, g: Any, scale: Any) -> Any:
    mean, var = map(lax.stop_gradient, _moments(x))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * scale + g)


def stopped_mean(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    return jax.nn.relu((x - lax.stop_gradient(mean)) * lax.rsqrt(var + 1e-3) * scale + g)


def stopped_variance(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(lax.stop_gradient(var) + 1e-3) * scale + g)


def statistics_of_a_stopped_array(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(lax.stop_gradient(x))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * scale + g)


def epsilon_of_the_program(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    return (x - mean) * lax.rsqrt(var + jnp.square(scale) + 1e-3)


def epsilon_outside_the_root(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) / (jnp.sqrt(var) + 1e-3))


def centred_array_returned(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    centred = x - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)), centred


def chosen_at_run_time(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _moments(x)
    mean = jnp.where(scale[..., 0] > 0, mean, scale)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def of_a_sum_with_a_vector(x: Any, g: Any, scale: Any) -> Any:
    """A bias as of a convolution, which stays out of what the kernel reads."""
    x = x + scale
    mean, var = _moments(x)
    return _gated(x, g, mean, var), mean.reshape(-1)


def of_channels_first(x: Any, g: Any, scale: Any) -> Any:
    return _gated(x, g, *_moments(x, (0, 2, 3)))


def of_ghost_batches(x: Any, g: Any, scale: Any) -> Any:
    x, g = (a.reshape(4, 4, 8, 8, 8) for a in (x, g))
    return _gated(x, g, *_moments(x, (1, 2, 3)))


def unbiased(x: Any, g: Any, scale: Any) -> Any:
    mean = x.mean(AXES, keepdims=True)
    return _gated(x, g, mean, x.var(AXES, keepdims=True, ddof=1))


def returned(x: Any, g: Any, scale: Any) -> Any:
    return tuple(a.reshape(-1) for a in _moments(x))


def returned_with_the_mean_of_squares(x: Any, g: Any, scale: Any) -> Any:
    mean, squares = x.mean(AXES), jnp.square(x).mean(AXES)
    return mean, squares, squares - mean * mean


def deviation(x: Any, g: Any, scale: Any) -> Any:
    return x.std(AXES)


def penalty(x: Any, g: Any, scale: Any) -> Any:
    mean, var = _fast_moments(x)
    return jnp.sum(jnp.square(mean)) + jnp.sum(jnp.square(var - 1))


# Each with a part of the reason why no operator computes more; empty if nothing is normalised.
PROGRAMS: dict[Callable[..., Any], str] = {
    gate: "such as a gate",
    gate_by_fast_statistics: "such as a gate",
    gate_in_slope_and_offset: "such as a gate",
    scale_chosen_for_each_element: "a choice at run time",
    stopped: "stop_gradient",
    stopped_mean: "mean that is subtracted",
    stopped_variance: "stop_gradient",
    statistics_of_a_stopped_array: "stop_gradient",
    epsilon_of_the_program: "epsilon is not a literal",
    epsilon_outside_the_root: "not understood",
    centred_array_returned: "used elsewhere",
    chosen_at_run_time: "mean that is subtracted",
    of_a_sum_with_a_vector: "such as a gate",
    of_channels_first: "such as a gate",
    of_ghost_batches: "such as a gate",
    unbiased: "such as a gate",
    returned: "",
    returned_with_the_mean_of_squares: "",
    deviation: "",
    penalty: "",
}
NAMED = {"argvalues": PROGRAMS, "ids": lambda f: f.__name__}


def _sums_of_arrays(jaxpr: Any) -> int:
    """How many sums a program takes of arrays as large as x; each is a pass, or part of one."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "reduce_sum" and equation.invars[0].aval.size == X.size
        inner = (p for p in equation.params.values() if hasattr(p, "jaxpr"))
        found += sum(_sums_of_arrays(closed.jaxpr) for closed in inner)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("function", **NAMED)
def test_programs(function: Callable[..., Any]) -> None:
    """One call takes the place of all sums; values and gradients are as close to float64 as before.

    The gradients are those of the program, whichever statistics it stops.
    """
    assert_fused(function, X, G, SCALE, batch_statistics=1)
    assert kernels(jax_bnar.fuse(function), X, G, SCALE) == 1
    assert _sums_of_arrays(jax.make_jaxpr(function)(X, G, SCALE).jaxpr) >= 2
    assert _sums_of_arrays(jax.make_jaxpr(jax_bnar.fuse(function))(X, G, SCALE).jaxpr) == 0
    (candidate,) = jax_bnar.explain(function)(X, G, SCALE).candidates
    reason = PROGRAMS[function]
    assert reason in candidate.reason if reason else not candidate.reason
    assert "test_fuse_statistics.py:" in candidate.line


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("function", [gate, stopped_variance, of_a_sum_with_a_vector, returned])
def test_16_bit_types(function: Callable[..., Any], dtype: Any) -> None:
    assert_fused(function, *(a.astype(dtype) for a in (X, G, SCALE)), batch_statistics=1)


def test_statistics_in_float32_of_a_16_bit_array() -> None:
    """The kernel reads the narrow array, and the conversion is left to the rest of the program."""

    def layer(x: Any, g: Any) -> Any:
        wide = x.astype(g.dtype)
        return _gated(wide, g, *_fast_moments(wide))

    assert_fused(layer, X.astype(jnp.bfloat16), G, batch_statistics=1)
    (candidate,) = jax_bnar.explain(layer)(X.astype(jnp.bfloat16), G).matched
    assert candidate.dtype == "bfloat16"


@pytest.mark.parametrize("function", **NAMED)
def test_derivatives_are_exact(function: Callable[..., Any]) -> None:
    """In float64, where rounding hides nothing: values, tangents and gradients of the program."""
    arguments = tuple(a.astype(jnp.float64) for a in (X, G, SCALE))
    tangents = tuple(jnp.cos(a) for a in arguments)
    results = []
    for f in (function, jax_bnar.fuse(function)):
        results.append(jax.jit(lambda a, t, f=f: jax.jvp(f, a, t))(arguments, tangents))
        y, pullback = jax.vjp(f, *arguments)
        results[-1] = (results[-1], jax.jit(pullback)(jax.tree.map(jnp.sin, y)))
    for given, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-9, atol=1e-9)


def test_far_from_zero() -> None:
    """E[x^2] - E[x]^2 loses all digits of the variance here, and the kernel does not."""

    def layer(x: Any) -> Any:
        return _fast_moments(x)[1].reshape(-1)

    x = X + 1e4
    exact = np.var(np.asarray(x, np.float64), AXES)
    np.testing.assert_allclose(jax.jit(jax_bnar.fuse(layer))(x), exact, rtol=1e-5)
    assert np.max(np.abs(np.asarray(jax.jit(layer)(x)) - exact) / exact) > 0.1


def test_vmap_and_loops() -> None:
    def layer(x: Any, g: Any) -> Any:
        return gate(x, g, SCALE)

    stacked = jnp.stack([X, 2 * X]), jnp.stack([G, 1 - G])
    given = jax.jit(jax.vmap(jax_bnar.fuse(layer)))(*stacked)
    np.testing.assert_allclose(given, jax.vmap(layer)(*stacked), rtol=1e-4, atol=1e-5)

    def loop(x: Any, g: Any) -> Any:
        return lax.scan(
            lambda c, _: (c + layer(c @ jnp.eye(8, dtype=c.dtype), g), None), x, None, 3
        )[0]

    assert operators(loop, X, G) == {"batch_statistics": 3}
    assert_no_worse(loop, X, G)
    remat = jax.checkpoint(layer)
    assert operators(remat, X, G) == {"batch_statistics": 1}
    assert_no_worse(remat, X, G)


def test_in_a_gradient() -> None:
    """Statistics are values, so a program may contain its own gradient, unlike a BatchNorm."""

    def loss(x: Any, g: Any) -> Any:
        return jnp.sum(jnp.square(gate(x, g, SCALE)))

    gradient = jax.grad(loss)
    assert operators(gradient, X, G) == {"batch_statistics": 1}
    assert_no_worse(gradient, X, G)

    def of_batch_norm(x: Any) -> Any:
        mean, var = _moments(x)
        return jnp.sum(jnp.square(jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))))

    for around in (lambda f: f, jax.jit):
        program = jax.grad(around(of_batch_norm))
        with pytest.raises(ValueError, match=r"write jax.grad\(fuse\(loss\)\)"):
            jax_bnar.fuse(program)(X)
        report = jax_bnar.explain(program)(X)
        assert not report.matched
        assert "instead of fuse" in str(report)


def test_a_batch_norm_wins() -> None:
    """What an operator computes as a whole gives the statistics as well."""

    def watched(x: Any, g: Any, scale: Any) -> Any:
        mean, var = _moments(x)
        y = (x - mean) * lax.rsqrt(var + 1e-3)
        return jax.nn.relu(y * scale), y.dtype, jnp.sqrt(var), lax.stop_gradient(mean)

    layer = lambda *args: watched(*args)[::2]  # noqa: E731 (a dtype is no array)
    assert_fused(layer, X, G, SCALE, bn_relu=1)

    def gated_after(x: Any, g: Any, scale: Any) -> Any:
        mean, var = _moments(x)
        return (x - mean) * lax.rsqrt(var + 1e-3) * jax.nn.sigmoid(g)

    assert_fused(gated_after, X, G, SCALE, batch_norm=1)

    def both(x: Any, g: Any, scale: Any) -> Any:
        """The gate reads what the BatchNorm computes, which is in memory for that reason alone."""
        return gate(watched(x, g, scale)[0], g, scale)

    assert_fused(both, X, G, SCALE, bn_relu=1, batch_statistics=1)


def test_what_reads_the_statistics_does_not_matter() -> None:
    def printed(x: Any) -> Any:
        jax.debug.print("{}", x.var(AXES))
        return x

    assert operators(printed, X) == {"batch_statistics": 1}

    def given_to_another(x: Any, g: Any) -> Any:
        """The variance of one array is a part of another's scale."""
        mean, var = _moments(g)
        return jax.nn.relu((g - mean) * lax.rsqrt(var + 1e-3) * x.var(AXES, keepdims=True))

    assert_fused(given_to_another, X, G, batch_statistics=1, bn_relu=1)


def mean_alone(x: Any) -> Any:
    return x - x.mean(AXES, keepdims=True)


def mean_of_squares_alone(x: Any) -> Any:
    return x * lax.rsqrt(jnp.square(x).mean(AXES, keepdims=True) + 1e-3)


def variance_that_nothing_reads(x: Any) -> Any:
    x.var(AXES)
    return x - x.mean(AXES, keepdims=True)


def of_each_example(x: Any) -> Any:
    return x.var((1, 2)), x.var(-1)


def of_everything(x: Any) -> Any:
    return x.var()


def in_a_wider_type(x: Any) -> Any:
    wide = x.astype(jnp.float64)
    return wide.mean(AXES), wide.var(AXES)


def of_another_centre(x: Any) -> Any:
    return jnp.mean(jnp.square(x - x.mean((0, 1, 2, 3), keepdims=True)), AXES)


def around_a_stopped_mean(x: Any) -> Any:
    return jnp.mean(jnp.square(x - lax.stop_gradient(x.mean(AXES, keepdims=True))), AXES)


def masked(x: Any) -> Any:
    return jnp.where(x > 0, x, 0).var(AXES, where=x > 0)


def higher_moments(x: Any) -> Any:
    return jnp.mean((x - x.mean(AXES, keepdims=True)) ** 3, AXES)


@pytest.mark.parametrize(
    "function",
    [
        mean_alone,
        mean_of_squares_alone,
        variance_that_nothing_reads,
        of_each_example,
        of_everything,
        in_a_wider_type,
        of_another_centre,
        around_a_stopped_mean,
        masked,
        higher_moments,
    ],
    ids=lambda f: f.__name__,
)
def test_lookalikes(function: Callable[..., Any]) -> None:
    assert_untouched(function, X)


IN_PASSING: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "mul": lambda x: 2 * x,
    "add": lambda x: x + 1,
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "exp": lambda x: lax.stop_gradient(jnp.exp(x)).reshape(-1, 8),
}


@pytest.mark.parametrize("name", IN_PASSING)
def test_arrays_that_are_nowhere_in_memory(name: str) -> None:
    """XLA computes such an array where it is read; an operator would have it written first."""

    def layer(x: Any) -> Any:
        a = IN_PASSING[name](x)
        return a.var(tuple(range(a.ndim - 1)))

    assert_untouched(layer, X, reason=f"XLA computes x ({name}) in the loop that sums it")


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x @ jnp.eye(8, dtype=x.dtype),
        lambda x: lax.conv_general_dilated(
            x,
            jnp.ones((3, 3, 8, 8), x.dtype),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        lambda x: x + x[::-1],
        lambda x: jax_bnar.batch_norm(x, None, None).y,
    ],
    ids=["matrix product", "convolution", "join", "operator"],
)
def test_arrays_in_memory(before: Callable[[Any], Any]) -> None:
    layer = lambda x: before(x).var(AXES)  # noqa: E731
    assert operators(layer, X) == {"batch_statistics": 1}
    assert_no_worse(layer, X)


def test_small_arrays() -> None:
    small = X[:4], G[:4], SCALE
    assert_untouched(gate, *small, reason="x has only 2048 elements")
    assert_untouched(stopped, *small, reason="stop_gradient is applied")
    report = jax_bnar.explain(deviation)(*small)
    assert str(report).splitlines()[0] == "nothing to fuse"


def test_bytes_saved() -> None:
    """One read of x, where the program takes the variance around the mean; else none."""
    report = jax_bnar.explain(gate)(X, G, SCALE)
    assert report.bytes_saved == SIZE
    assert str(report).startswith("(no module): batch_statistics (")
    assert jax_bnar.explain(gate_by_fast_statistics)(X, G, SCALE).bytes_saved == 0
    assert "batch_statistics" in report.summary()
    assert "batch_statistics" in report.html()
    assert "pd_op" not in report.graphs()  # Paddle's pass has no such pattern


def test_each_place_has_one_line() -> None:
    """Another normalisation of the same array keeps its own reason."""

    def layer(x: Any, g: Any) -> Any:
        mean, var = _moments(x, 3)
        with jax.named_scope("gate"):
            y = gate(x, g, SCALE)
        return y, (x - mean) * lax.rsqrt(var + 1e-3)

    by_module = {c.operator: c for c in jax_bnar.explain(layer)(X, G).candidates}
    assert set(by_module) == {"batch_statistics", None}
    assert by_module["batch_statistics"].module.startswith("gate")
    assert "LayerNorm" in by_module[None].reason
    assert "LayerNorm" not in by_module["batch_statistics"].reason


GROUPS = [[0, 2], [3, 1]]


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["whole", "groups"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_named_axes(groups: Any, check_vma: bool) -> None:
    """Statistics of all devices, or of groups of them, are one call with these names."""
    if groups is not None and check_vma:
        pytest.skip("JAX does not support axis_index_groups with check_vma")

    def layer(x: Any, g: Any) -> Any:
        mean = lax.pmean(x.mean(AXES, keepdims=True), "data", axis_index_groups=groups)
        squares = lax.pmean(
            jnp.square(x).mean(AXES, keepdims=True), "data", axis_index_groups=groups
        )
        return _gated(x, g, mean, squares - mean * mean)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(
        layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    x, g = array((64, 8, 8, 8)), array((64, 8, 8, 8), 1)
    assert operators(program, x, g) == {"batch_statistics": 1}
    assert kernels(jax_bnar.fuse(program), x, g) == 1
    assert_no_worse(program, x, g)


def test_synchronised_statistics_that_are_read_as_varying() -> None:
    """With check_vma, the program declares the mean varying where it meets x, here once more."""

    def layer(x: Any, g: Any) -> Any:
        mean = lax.pmean(x.mean(AXES, keepdims=True), "data")
        squares = lax.pmean(jnp.square(x).mean(AXES, keepdims=True), "data")
        y = jax.nn.relu((x - mean) * lax.rsqrt(squares - mean * mean + 1e-3))
        return y + g * mean

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert operators(program, X, G) == {"bn_relu": 1}
    assert_no_worse(program, X, G)


def test_the_axis_of_a_vmap() -> None:
    def member(x: Any, g: Any) -> Any:
        mean = lax.pmean(x.mean((0, 1), keepdims=True), "batch")
        var = lax.pmean(jnp.square(x - mean).mean((0, 1), keepdims=True), "batch")
        return _gated(x, g, mean, var)

    program = jax.vmap(member, axis_name="batch")
    assert operators(program, X, G) == {"batch_statistics": 1}
    assert_no_worse(program, X, G)


def test_local_variances_of_devices() -> None:
    """The mean of the devices' own variances is no variance, but each of those is one."""

    def layer(x: Any, g: Any) -> Any:
        mean, var = _moments(x)
        return _gated(x, g, lax.pmean(mean, "data"), lax.pmean(var, "data"))

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x, g = array((64, 8, 8, 8)), array((64, 8, 8, 8), 1)
    assert operators(program, x, g) == {"batch_statistics": 1}
    assert_no_worse(program, x, g)


def test_sharded_arrays() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x, g = (jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (X, G))
    given = jax.jit(jax_bnar.fuse(gate))(x, g, SCALE)
    np.testing.assert_allclose(given, gate(X, G, SCALE), rtol=1e-4, atol=1e-5)


def test_calls_stay_calls() -> None:
    """Statistics alone are not worth the inlining of a large jitted function."""

    @jax.jit
    def block(x: Any, mean: Any) -> Any:
        return jnp.sin(jnp.square(x - mean.reshape(1, 1, 1, -1)).mean(AXES)) @ jnp.eye(
            8, dtype=x.dtype
        )

    assert_untouched(lambda x: block(x, x.mean(AXES)), X)


class Gated(nn.Module):
    """A layer of Linen with running statistics and a gate inside of its affine."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        running = self.variable("batch_stats", "var", jnp.ones, (x.shape[-1],), x.dtype)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), x.dtype)
        x = nn.Conv(16, (3, 3))(x)
        g = nn.Dense(16)(x)
        mean, var = _moments(x)
        running.value = 0.5 * running.value + 0.5 * var.reshape(-1)[: x.shape[-1] // 2]
        gated = lax.rsqrt(var + 1e-5) * jnp.repeat(scale, 2).reshape(1, 1, 1, -1) * nn.sigmoid(g)
        return nn.relu((x - mean) * gated)


def test_a_linen_module() -> None:
    variables = Gated().init(jax.random.key(0), X)

    def loss(params: Any, statistics: Any, x: Any) -> Any:
        given = {"params": params, "batch_stats": statistics}
        y, updated = Gated().apply(given, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y)), updated

    arguments = (variables["params"], variables["batch_stats"], X)
    assert operators(loss, *arguments) == {"batch_statistics": 1}
    (candidate,) = jax_bnar.explain(loss)(*arguments).candidates
    assert "Gated" in candidate.module
    results = [
        jax.jit(jax.value_and_grad(f, has_aux=True))(*arguments)
        for f in (jax_bnar.fuse(loss), loss)
    ]
    for given, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(given, expected, rtol=2e-4, atol=2e-5)


class GatedModule(nnx.Module):
    def __init__(self) -> None:
        self.gate = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.running = nnx.BatchStat(jnp.ones(8, jnp.float32))

    def __call__(self, x: Any) -> Any:
        mean, var = _moments(x)
        self.running[...] = 0.5 * self.running[...] + 0.5 * var.reshape(-1)
        return _gated(x, self.gate(x), mean, var)


def test_an_nnx_module() -> None:
    def loss(module: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(module(x)))

    assert operators(loss, GatedModule(), X) == {"batch_statistics": 1}
    results = []
    for f in (jax_bnar.fuse(loss), loss):
        module = GatedModule()
        results.append((nnx.jit(nnx.value_and_grad(f))(module, X), module.running[...]))
    for given, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(given, expected, rtol=2e-4, atol=2e-5)


@hypothesis.given(
    base=st.sampled_from(BASES),
    index=st.integers(0, 40),
    mutation=st.sampled_from(sorted(MUTATIONS)),
)
@hypothesis.settings(max_examples=example_count(40))
def test_mutants_compute_the_same(base: Callable[..., Any], index: int, mutation: str) -> None:
    """Mutants of a BatchNorm are small, so without the limit of size most of them are matched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics_search, "_FEWEST_ELEMENTS", 0)
        require_equal(mutant(base, index, mutation))


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES, ids=lambda f: f.__name__)
def test_every_mutant_computes_the_same(
    base: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_search, "_FEWEST_ELEMENTS", 0)
    taken = 0
    for index in range(len(jax.make_jaxpr(base)(*OF_MUTANTS).jaxpr.eqns)):
        for mutation in MUTATIONS:
            program = mutant(base, index, mutation)
            taken += "batch_statistics" in operators(program, *OF_MUTANTS)
            require_equal(program)
    assert taken > 0 or base.__name__ == "evaluation"
