"""Programs that `fuse` must refuse: each is reported with its reason, and left unchanged."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_operands import AXES, BIAS, SCALE, X, Z, vector
from fuse_tools import array, assert_fused, assert_no_worse, assert_untouched, operators
from jax import lax

import jax_bnar


def _norm(x: Any, axes: Any = AXES, epsilon: Any = 1e-3) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(axes, keepdims=True) + epsilon)


def _affine(x: Any, scale: Any, bias: Any) -> jax.Array:
    return x * scale.reshape(1, 1, 1, -1) + bias.reshape(1, 1, 1, -1)


def _batch_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    return _affine(_norm(x), scale, bias)


def _moments(x: Any) -> tuple[jax.Array, jax.Array]:
    return x.mean(AXES, keepdims=True), x.var(AXES, keepdims=True)


def layer_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_affine(_norm(x, (3,)), scale, bias))


def layer_norm_of_rows(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_norm(x.reshape(6, -1), (1,)))


def layer_norm_of_examples(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_affine(_norm(x, (1, 2, 3)), scale, bias))


def instance_norm_of_few(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_affine(_norm(x, (1, 2)), scale, bias))


def instance_norm_of_few_by_division(x: Any, scale: Any, bias: Any) -> jax.Array:
    """JAX knows no line of the program for a division by an operator."""
    mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    y = x - mean
    y /= jnp.sqrt(var + 1e-3)
    return jax.nn.relu(y)


def instance_norm_of_few_and_residual(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_affine(_norm(x, (1, 2)), scale, bias) + jnp.sin(x))


def group_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    groups = jnp.concatenate([x, x * 2], -1).reshape(6, 5, 4, 2, 3)
    return jax.nn.relu(_norm(groups, (1, 2, 4)).reshape(6, 5, 4, 6))


def flax_group_norm(x: Any, scale: Any, bias: Any) -> Any:
    x, scale, bias = (jnp.concatenate([a, a * 2], -1) for a in (x, scale, bias))
    return nn.GroupNorm(3).apply({"params": {"scale": scale, "bias": bias}}, x)


def two_channel_axes(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_norm(x, (0, 1)))


def all_axes(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_norm(x, (0, 1, 2, 3)))


def ddof(x: Any, scale: Any, bias: Any) -> jax.Array:
    var = x.var(AXES, keepdims=True, ddof=1)
    y = (x - x.mean(AXES, keepdims=True)) * lax.rsqrt(var + 1e-3)
    return jax.nn.relu(_affine(y, scale, bias))


def wrong_count(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean = x.sum(AXES, keepdims=True) / 119
    return jax.nn.relu((x - mean) * lax.rsqrt(((x - mean) ** 2).mean(AXES, keepdims=True) + 1e-3))


def other_floor(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(jnp.maximum(var, 1e-2) + 1e-3))


def floor_after_epsilon(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(jnp.maximum(var - 0.5, 0) + 1e-3))


def other_centre(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean = x.mean(AXES, keepdims=True)
    var = jnp.mean((x - x.mean((0, 1, 2, 3))) ** 2, AXES, keepdims=True)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def running_mean_subtracted(x: Any, scale: Any, bias: Any) -> jax.Array:
    y = (x - bias.reshape(1, 1, 1, -1)) * lax.rsqrt(x.var(AXES, keepdims=True) + 1e-3)
    return jax.nn.relu(y)


def no_epsilon(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(var))


def epsilon_of_the_program(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(_norm(x, epsilon=jnp.abs(scale).reshape(1, 1, 1, -1)))


def epsilon_outside_the_root(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) / (jnp.sqrt(var) + 1e-3))


def stopped_statistics(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = _moments(x)
    mean, var = lax.stop_gradient(mean), lax.stop_gradient(var)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def masked(x: Any, scale: Any, bias: Any) -> jax.Array:
    mask = x[..., :1] > 0
    count = mask.sum().astype(x.dtype)
    mean = jnp.where(mask, x, 0).sum(AXES, keepdims=True) / count
    var = jnp.where(mask, x * x, 0).sum(AXES, keepdims=True) / count - mean * mean
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def masked_by_a_product(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The padding of a Conformer, as Lingvo and AlgoPerf write it."""
    mask = (x[..., :1] > 0).astype(x.dtype)
    count = jnp.maximum(jnp.sum(jnp.ones_like(x) * mask, AXES, keepdims=True), 1)
    mean = jnp.sum(x * mask, AXES, keepdims=True) / count
    var = jnp.sum((x - mean) * (x - mean) * mask, AXES, keepdims=True) / count
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def renormalised(x: Any, scale: Any, bias: Any) -> jax.Array:
    """As batch renormalisation corrects the variance by running statistics."""
    mean, var = _moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(var * scale.reshape(1, 1, 1, -1) ** 2 + 1e-3))


def chosen_statistics(x: Any, scale: Any, bias: Any) -> jax.Array:
    """Batch or given statistics, chosen by a flag that is only known at run time."""
    mean, var = _moments(x)
    flag = scale[0] > 0
    mean = jnp.where(flag, mean, bias.reshape(1, 1, 1, -1))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def centred_array_returned(x: Any, scale: Any, bias: Any) -> Any:
    mean, var = _moments(x)
    centred = x - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)), centred


def centred_array_read(x: Any, scale: Any, bias: Any) -> Any:
    mean, var = _moments(x)
    centred = x - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)) + jnp.sin(centred)


def narrower_inside(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The program rounds x on purpose."""
    mean, var = _moments(x)
    centred = (x - mean).astype(jnp.bfloat16).astype(jnp.float32)
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3))


def wider_inside(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The kernel would compute in float32 what the program computes in float64."""
    return jax.nn.relu(_norm(x.astype(jnp.float64)).astype(jnp.float32))


def by_matrix_product(x: Any, scale: Any, bias: Any) -> jax.Array:
    rows = x.reshape(-1, 3)
    weights = jnp.full(len(rows), 1 / len(rows), x.dtype)
    mean = weights @ rows
    var = weights @ jnp.square(rows) - mean * mean
    return jax.nn.relu((rows - mean[None]) * lax.rsqrt(var + 1e-3)[None])


def by_windows(x: Any, scale: Any, bias: Any) -> jax.Array:
    def mean(a: Any) -> Any:
        return lax.reduce_window(a, 0.0, lax.add, (*a.shape[:3], 1), (1,) * 4, "VALID") / 120

    var = mean(x * x) - mean(x) ** 2
    return jax.nn.relu((x - mean(x)) * lax.rsqrt(var + 1e-3))


def in_a_loop(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The sum over the examples is taken one example after another."""
    start = jnp.zeros((2, 3), x.dtype)
    add = lambda c, a: (c + jnp.stack([a.mean((0, 1)), (a * a).mean((0, 1))]) / 6, None)  # noqa: E731
    (mean, squares), _ = lax.scan(add, start, x)
    var = squares - mean * mean
    return jax.nn.relu((x - mean.reshape(1, 1, 1, 3)) * lax.rsqrt(var + 1e-3).reshape(1, 1, 1, 3))


REFUSED: dict[Callable[..., Any], str] = {
    layer_norm: "LayerNorm",
    layer_norm_of_rows: "LayerNorm",
    layer_norm_of_examples: "LayerNorm",
    instance_norm_of_few: "fewer than 32 elements",
    instance_norm_of_few_by_division: "fewer than 32 elements",
    instance_norm_of_few_and_residual: "fewer than 32 elements",
    group_norm: "GroupNorm",
    flax_group_norm: "GroupNorm",
    two_channel_axes: "several axes",
    all_axes: "no channel axis",
    ddof: "times the population variance of x, as with ddof",
    wrong_count: "population variance",
    other_floor: "clamped at a value",
    floor_after_epsilon: "clamped at a value",
    other_centre: "centre",
    running_mean_subtracted: "mean that is subtracted",
    no_epsilon: "epsilon",
    epsilon_of_the_program: "epsilon is not a constant",
    epsilon_outside_the_root: "a number is added to the standard deviation",
    stopped_statistics: "stop_gradient",
    masked: "mask",
    masked_by_a_product: "a mask or a weight multiplies each element",
    renormalised: "multiplied with an array that is not computed from x, such as running",
    chosen_statistics: "mean that is subtracted",
    centred_array_returned: "used elsewhere",
    centred_array_read: "used elsewhere",
    narrower_inside: "rounds intermediate",
    wider_inside: "rounds intermediate",
    by_matrix_product: "matrix product",
    by_windows: "reduce_window",
    in_a_loop: "in a loop",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused(function: Callable[..., Any]) -> None:
    """The report has one line, with the reason and the line at which the program normalises."""
    assert_untouched(function, X, SCALE, BIAS, reason=REFUSED[function])
    (candidate,) = jax_bnar.explain(function)(X, SCALE, BIAS).candidates
    assert "test_fuse_refusals.py:" in candidate.line


def test_only_what_may_be_a_batch_norm_gets_the_hint_of_a_vmap() -> None:
    def refused(function: Callable[..., Any], x: Any) -> str:
        (candidate,) = jax_bnar.explain(function)(x).refused
        return candidate.reason

    hint = "; where they are those of several batches under a vmap, write vmap(fuse(f))"
    channels_first = functools.partial(_norm, axes=(0, 2, 3))
    assert refused(jax.vmap(channels_first), jnp.stack([X, Z])).endswith(hint)
    for axes in ((3,), (1, 2, 3)):
        reason = refused(functools.partial(_norm, axes=axes), X)
        assert reason.endswith("as in LayerNorm or GroupNorm")


def test_what_is_no_batch_norm_has_no_line() -> None:
    """Roots and sums that are unrelated to BatchNorm do not appear in the report."""

    def unit_length(x: Any) -> Any:
        return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)

    def clipped(x: Any, z: Any) -> Any:
        """Clips gradients by their global norm."""
        norm = jnp.sqrt(sum(jnp.sum(a * a) for a in (x, z)))
        return x / jnp.maximum(norm, 1), z / jnp.maximum(norm, 1)

    def attention(x: Any) -> Any:
        rows = x.reshape(-1, 3)
        return jax.nn.softmax(rows @ rows.T / jnp.sqrt(3.0), -1) @ rows

    def adam(x: Any, z: Any) -> Any:
        return x / (jnp.sqrt(z * z) + 1e-8)

    def deviation(x: Any) -> Any:
        return x, x.std(AXES)

    for function, *args in ((attention, X), (adam, X, Z), (deviation, X), (clipped, X, Z)):
        report = jax_bnar.explain(function)(*args)
        assert str(report).splitlines()[0] == "nothing to fuse", function.__name__
    assert not jax_bnar.explain(unit_length)(X).matched


def test_integers() -> None:
    def layer(x: Any) -> jax.Array:
        mean = x.sum(AXES, keepdims=True) // 120
        return jax.nn.relu((x - mean) * 2)

    assert_untouched(layer, jnp.arange(360).reshape(6, 5, 4, 3))


def test_complex_numbers() -> None:
    def layer(x: Any) -> jax.Array:
        mean = x.mean(AXES, keepdims=True)
        return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(AXES, keepdims=True) + 1e-3)

    assert_untouched(layer, lax.complex(X, Z))


def test_nothing_to_fuse() -> None:
    def network(x: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(_affine(jnp.sin(x), scale, bias).mean((1, 2)) @ jnp.outer(scale, bias))

    assert_untouched(network, X, SCALE, BIAS)


def test_derivatives_that_know_the_whole_are_left_alone() -> None:
    """A BatchNorm with a custom backward pass is not looked into."""

    @jax.custom_vjp
    def norm(x: Any) -> Any:
        return _norm(x)

    norm.defvjp(lambda x: (_norm(x), None), lambda _, g: (g,))
    assert_untouched(lambda x: norm(x), X)


def test_cycles() -> None:
    """A value that depends on statistics cannot be an operand of the call that computes them."""

    def residual(x: Any, z: Any) -> Any:
        return jax.nn.relu(_norm(x) + z * x.mean(AXES, keepdims=True))

    assert_fused(residual, X, Z, batch_norm=1)
    (candidate,) = jax_bnar.explain(residual)(X, Z).matched
    assert "cycle" in candidate.reason

    def scale(x: Any) -> Any:
        mean, var = _moments(x)
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * jnp.sin(mean) + var)

    assert_fused(scale, X, batch_norm=1)

    def each_other(x: Any, z: Any) -> Any:
        """Two joins, each with the other's mean in its residual."""
        first = jax.nn.relu(_norm(x) + x * jnp.sin(z.mean(AXES, keepdims=True)))
        return first, jax.nn.relu(_norm(z) + z * jnp.sin(x.mean(AXES, keepdims=True)))

    counts = operators(each_other, X, Z)
    assert counts == {"bn_add_relu": 1, "batch_norm": 1}
    assert_no_worse(each_other, X, Z)


def test_parameters_of_each_example() -> None:
    """In a conditional BatchNorm, the normalisation is fused but its parameters are not."""

    def layer(x: Any, scales: Any) -> Any:
        return jax.nn.relu(_norm(x) * scales[:, None, None, :])

    assert_fused(layer, X, array((6, 3), 5), batch_norm=1)


def test_evaluation_that_depends_on_x_is_refused() -> None:
    """A training form that is refused must not come back as an evaluation form."""
    assert_untouched(ddof, X, SCALE, BIAS)


def test_affine_pre_activation_used_elsewhere() -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        a = _affine(x, scale, bias)
        return jax.nn.relu(a), a

    assert_untouched(layer, X, SCALE, BIAS, reason="used elsewhere")


def test_affine_array_before_the_bias_used_elsewhere() -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        scaled = x * vector(scale)
        return jax.nn.relu(scaled + vector(bias)), scaled

    assert_untouched(layer, X, SCALE, BIAS, reason="between x and the ReLU is used elsewhere")


def test_affine_of_other_axes() -> None:
    def gate(x: Any, gates: Any) -> Any:
        return jax.nn.relu(x * gates[:, None, None, :])

    assert_untouched(gate, X, array((6, 3), 5))

    def examples(x: Any, weights: Any) -> Any:
        return jax.nn.relu(x * weights.reshape(-1, 1, 1, 1))

    assert_untouched(examples, X, array((6,), 5))


def test_bias_alone_is_no_batch_norm() -> None:
    def layer(x: Any, bias: Any) -> Any:
        return jax.nn.relu(x + bias.reshape(1, 1, 1, -1))

    assert_untouched(layer, X, BIAS)


def test_gradients_inside() -> None:
    def loss(x: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(_batch_norm(x, scale, bias)).sum()

    with pytest.raises(ValueError, match=r"write jax.grad\(fuse\(loss\)\)"):
        jax_bnar.fuse(jax.grad(loss))(X, SCALE, BIAS)
    with pytest.raises(ValueError, match="instead of fuse"):
        jax_bnar.fuse(jax.jit(jax.value_and_grad(jax.jit(loss))))(X, SCALE, BIAS)
    report = jax_bnar.explain(jax.grad(loss))(X, SCALE, BIAS)
    assert not report.matched
    assert "instead of fuse" in str(report)


@pytest.mark.parametrize("mode", ["grad", "jvp"])
def test_a_loss_that_contains_a_derivative(mode: str) -> None:
    """What is not differentiated within the loss is fused, and the rest if the user fuses it."""

    def network(x: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(_batch_norm(x, scale, bias)).sum()

    def loss(network: Any) -> Any:
        def penalised(x: Any, scale: Any, bias: Any) -> Any:
            if mode == "grad":
                slope = jax.grad(network)(x, scale, bias)
            else:
                slope = jax.jvp(lambda x: network(x, scale, bias), (x,), (x**2,))[1]
            return network(x, scale, bias) + 0.1 * (slope**2).sum()

        return penalised

    expected = jax.grad(loss(network))(X, SCALE, BIAS)
    words = r"not everything is fused.* jax.grad\(fuse\(f\)\), jax.jvp\(fuse\(f\), ...\)"
    with pytest.warns(RuntimeWarning, match=words):
        outside = jax.grad(jax_bnar.fuse(loss(network)))(X, SCALE, BIAS)
    inside = jax.grad(loss(jax_bnar.fuse(network)))(X, SCALE, BIAS)
    for given in (outside, inside):
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)
    assert operators(loss(network), X, SCALE, BIAS) == {"bn_relu": 1}


def test_layer_norm_in_a_gradient_is_left_alone() -> None:
    """The gradient is not what stands in its way, so there is no hint and no error."""

    def loss(x: Any, scale: Any, bias: Any) -> Any:
        return layer_norm(x, scale, bias).sum()

    assert_untouched(jax.grad(loss), X, SCALE, BIAS, reason="LayerNorm")


def test_what_is_not_a_function() -> None:
    with pytest.raises(TypeError, match="fun must be callable, got ArrayImpl"):
        jax_bnar.fuse(X)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"explain: fun must be callable"):
        jax_bnar.explain(None)  # type: ignore[arg-type]

    def generator(x: Any) -> Any:
        yield x

    async def coroutine(x: Any) -> Any:
        return x

    class Asynchronous:
        async def __call__(self, x: Any) -> Any:
            return x

    for function, kind in (
        (generator, "generator"),
        (functools.partial(coroutine), "coroutine"),
        (Asynchronous(), "coroutine"),
    ):
        with pytest.raises(TypeError, match=f"fuse: fun must be .* got a {kind} function"):
            jax_bnar.fuse(function)


@pytest.mark.parametrize("name", ["flax.nnx", "flax.linen"])
def test_while_another_thread_imports_flax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is there then, and has not got its names yet."""
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert jax_bnar.fuse(jnp.sin)(0.0) == 0
    weights, x = jnp.ones((2, 3), jnp.float32), jnp.ones((4, 2), jnp.float32)
    assert jax_bnar.fold_batch_norms(lambda w, x: x @ w, weights, x).report.layers == ()


def test_long_chains() -> None:
    """Nothing recurses along the program, and no coefficient overflows."""

    def chain(x: Any, scale: Any) -> Any:
        for _ in range(1500):
            x = x + 1.0
        y = _norm(x)
        for _ in range(1500):
            y = y + x
        for _ in range(40):
            scale = scale * 1e30
        return jax.nn.relu(y * 1e30 * 1e30 * scale.reshape(1, 1, 1, -1))

    report = jax_bnar.explain(chain)(X, SCALE)
    assert [candidate.operator for candidate in report.candidates] == ["batch_norm"]

    def overflowing(x: Any) -> Any:
        y = _norm(x)
        for _ in range(20):
            y = y * 1e30
        return jax.nn.relu(y)

    assert operators(overflowing, X) == {"batch_norm": 1}


def outer_product(x: Any) -> jax.Array:
    squares = (x[:, None] * x[None]).mean((0, 1), keepdims=True)[0]
    mean = x.mean(0, keepdims=True)
    return (x - mean) * lax.rsqrt(squares - mean * mean + 1)


def sums_of_pairs(x: Any) -> Any:
    squares = jnp.square(x[:, None] + x[None]).mean((0, 1))
    return x.var(0), squares, (x[:, :, None] * x[:, None]).mean(0)


@pytest.mark.parametrize("fun", [outer_product, sums_of_pairs])
def test_products_of_different_elements_are_no_squares(fun: Callable[..., Any]) -> None:
    x = array((64, 64))  # large enough for statistics alone to be worth a call

    def gradient(fun: Callable[..., Any]) -> Any:
        return jax.grad(lambda x: sum(jnp.sin(y).sum() for y in jax.tree.leaves(fun(x))))(x)

    fused = jax_bnar.fuse(fun)
    for ours, theirs in zip(
        jax.tree.leaves((fused(x), gradient(fused))),
        jax.tree.leaves((fun(x), gradient(fun))),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
