"""Programs that `fuse` must refuse: each is reported with its reason, and left unchanged."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_operands import AXES, BIAS, SCALE, X, Z, vector
from fuse_tools import array, assert_fused, assert_no_worse, assert_untouched, operators
from jax import lax
from refused_programs import (
    REFUSED,
    affine,
    affine_norm,
    ddof,
    layer_norm,
    moments,
    normalised,
)

import jax_bnar


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused(function: Callable[..., Any]) -> None:
    """The report has one line, with the reason and the line at which the program normalises."""
    assert_untouched(function, X, SCALE, BIAS, reason=REFUSED[function])
    (candidate,) = jax_bnar.explain(function)(X, SCALE, BIAS).candidates
    assert "refused_programs.py:" in candidate.line


def test_only_what_may_be_a_batch_norm_gets_the_hint_of_a_vmap() -> None:
    def refused(function: Callable[..., Any], x: Any) -> str:
        (candidate,) = jax_bnar.explain(function)(x).refused
        return candidate.reason

    hint = "; where they are those of several batches under a vmap, write vmap(fuse(f))"
    channels_first = functools.partial(normalised, axes=(0, 2, 3))
    assert refused(jax.vmap(channels_first), jnp.stack([X, Z])).endswith(hint)
    for axes in ((3,), (1, 2, 3)):
        reason = refused(functools.partial(normalised, axes=axes), X)
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
        return jax.nn.relu(affine(jnp.sin(x), scale, bias).mean((1, 2)) @ jnp.outer(scale, bias))

    assert_untouched(network, X, SCALE, BIAS)


def test_derivatives_that_know_the_whole_are_left_alone() -> None:
    """A BatchNorm with a custom backward pass is not looked into."""

    @jax.custom_vjp
    def norm(x: Any) -> Any:
        return normalised(x)

    norm.defvjp(lambda x: (normalised(x), None), lambda _, g: (g,))
    assert_untouched(lambda x: norm(x), X)


def test_cycles() -> None:
    """A value that depends on statistics cannot be an operand of the call that computes them."""

    def residual(x: Any, z: Any) -> Any:
        return jax.nn.relu(normalised(x) + z * x.mean(AXES, keepdims=True))

    assert_fused(residual, X, Z, batch_norm=1)
    (candidate,) = jax_bnar.explain(residual)(X, Z).matched
    assert "cycle" in candidate.reason

    def scale(x: Any) -> Any:
        mean, var = moments(x)
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * jnp.sin(mean) + var)

    assert_fused(scale, X, batch_norm=1)

    def each_other(x: Any, z: Any) -> Any:
        """Two joins, each with the other's mean in its residual."""
        first = jax.nn.relu(normalised(x) + x * jnp.sin(z.mean(AXES, keepdims=True)))
        return first, jax.nn.relu(normalised(z) + z * jnp.sin(x.mean(AXES, keepdims=True)))

    counts = operators(each_other, X, Z)
    assert counts == {"bn_add_relu": 1, "batch_norm": 1}
    assert_no_worse(each_other, X, Z)


def test_parameters_of_each_example() -> None:
    """In a conditional BatchNorm, the normalisation is fused but its parameters are not."""

    def layer(x: Any, scales: Any) -> Any:
        return jax.nn.relu(normalised(x) * scales[:, None, None, :])

    assert_fused(layer, X, array((6, 3), 5), batch_norm=1)


def test_evaluation_that_depends_on_x_is_refused() -> None:
    """A training form that is refused must not come back as an evaluation form."""
    assert_untouched(ddof, X, SCALE, BIAS)


def test_affine_pre_activation_used_elsewhere() -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        a = affine(x, scale, bias)
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
        return jax.nn.relu(affine_norm(x, scale, bias)).sum()

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
        return jax.nn.relu(affine_norm(x, scale, bias)).sum()

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
        y = normalised(x)
        for _ in range(1500):
            y = y + x
        for _ in range(40):
            scale = scale * 1e30
        return jax.nn.relu(y * 1e30 * 1e30 * scale.reshape(1, 1, 1, -1))

    report = jax_bnar.explain(chain)(X, SCALE)
    assert [candidate.operator for candidate in report.candidates] == ["bn_act"]

    def overflowing(x: Any) -> Any:
        y = normalised(x)
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
