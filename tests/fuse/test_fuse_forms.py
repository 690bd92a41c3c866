"""Every spelling of BatchNorm in training that `fuse` takes, and what follows it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_operands import AXES, BIAS, SCALE, X, Z, batch_norm, moments, normalise, vector
from fuse_tools import array, assert_fused, assert_untouched, kernels, operators
from jax import lax

import jax_bnar
from jax_bnar._fuse import affine

COUNT = 6 * 5 * 4

Statistics = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
Normalise = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def two_pass(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES)
    return mean, jnp.mean(jnp.square(x - vector(mean)), AXES)


def fast(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES)
    return mean, (x * x).mean(AXES) - mean * mean


def fast_clamped(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES)
    return mean, jnp.maximum((x**2).mean(AXES) - lax.square(mean), 0)


def clamped_first(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES)
    return mean, jnp.maximum(0.0, jnp.square(x).mean(AXES) - jnp.square(mean))


def by_counts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    count = jnp.maximum(x.shape[0] * x.shape[1] * x.shape[2], 1).astype(x.dtype)
    mean = x.sum(AXES) / count
    return mean, jnp.sum((x - vector(mean)) ** 2, AXES) / count


def by_reciprocal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.sum(AXES) * (1 / COUNT)
    return mean, jnp.sum((x - vector(mean)) ** 2, AXES) * (1 / COUNT)


def kept_dims(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES, keepdims=True)
    return mean, x.var(AXES, keepdims=True)


def step_by_step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes means of means, as two nested `vmap`s do."""
    mean = x.mean((1, 2)).mean(0)
    return mean, (x * x).mean(2).mean((0, 1)) - mean * mean


def of_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = x.reshape(-1, x.shape[-1])
    return rows.mean(0), rows.var(0)


def unbiased_aside(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums the squares first, and takes their mean from a separate sum."""
    squares = jnp.sum(lax.integer_pow(x, 2), AXES)
    total = jnp.sum(x, AXES)
    return total / COUNT, (squares - total * total / COUNT) / COUNT


STATISTICS = [
    two_pass,
    moments,
    fast,
    fast_clamped,
    clamped_first,
    by_counts,
    by_reciprocal,
    kept_dims,
    step_by_step,
    of_rows,
    unbiased_aside,
]


def vectors_first(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    slope = lax.rsqrt(var.reshape(-1) + 1e-3) * scale
    return (x - vector(mean)) * vector(slope) + vector(bias)


def scale_first(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return (x - vector(mean)) * (vector(scale) * lax.rsqrt(vector(var) + 1e-3)) + vector(bias)


def folded(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    slope = scale * lax.rsqrt(var.reshape(-1) + 1e-3)
    return x * vector(slope) + vector(bias - mean.reshape(-1) * slope)


def folded_the_other_way(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    slope = scale / jnp.sqrt(var.reshape(-1) + 1e-3)
    return vector(bias) - vector(slope * mean.reshape(-1)) + vector(slope) * x


def divided(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return (x - vector(mean)) / jnp.sqrt(vector(var) + 1e-3) * vector(scale) + vector(bias)


def by_power(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return vector(scale) * (x - vector(mean)) * (vector(var) + 1e-3) ** -0.5 + vector(bias)


def by_reciprocal_of_std(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    std = jnp.sqrt(1e-3 + vector(var))
    return vector(bias) + vector(scale) * ((x - vector(mean)) * (1 / std))


def centred_at_zero(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    """The scale is stored as its difference from 1."""
    xhat = (x - vector(mean)) * lax.rsqrt(vector(var) + 1e-3)
    return xhat * vector(1.0 + scale) + vector(bias)


def without_parameters(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return (x - vector(mean)) * lax.rsqrt(vector(var) + 1e-3)


def negated(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    xhat = -(vector(mean) - x) * lax.rsqrt(vector(var) + 1e-3)
    return vector(bias) - xhat * -vector(scale)


def through_jits(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    @jax.jit
    def standardize(x: Any, mean: Any, var: Any) -> Any:
        return (x - mean) * lax.rsqrt(var + 1e-3)

    affine = jax.jit(lambda a, s, b: a * s + b)
    return affine(standardize(x, vector(mean), vector(var)), vector(scale), vector(bias))


NORMALISATIONS = [
    normalise,
    vectors_first,
    scale_first,
    folded,
    folded_the_other_way,
    divided,
    by_power,
    by_reciprocal_of_std,
    centred_at_zero,
    without_parameters,
    negated,
    through_jits,
]


@pytest.mark.parametrize("statistics", STATISTICS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("normalise", [normalise, folded], ids=lambda f: f.__name__)
def test_statistics(statistics: Statistics, normalise: Normalise) -> None:
    def layer(x: jax.Array, z: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        mean, var = statistics(x)
        return jax.nn.relu(normalise(x, mean, var, scale, bias) + z)

    assert_fused(layer, X, Z, SCALE, BIAS, bn_add_relu=1)


@pytest.mark.parametrize("normalise", NORMALISATIONS, ids=lambda f: f.__name__)
def test_normalisations(normalise: Normalise) -> None:
    def layer(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.relu(normalise(x, *moments(x), scale, bias))

    assert_fused(layer, X, SCALE, BIAS, bn_relu=1)


TAILS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "nothing": (lambda bn, z: bn, {"batch_norm": 1}),
    "twice": (lambda bn, z: jax.nn.relu(bn + bn), {"bn_relu": 1}),
    "a vector": (lambda bn, z: jax.nn.relu(bn + z[:1, :1, :1]), {"bn_relu": 1}),
    "relu": (lambda bn, z: jax.nn.relu(bn), {"bn_relu": 1}),
    "bn + z": (lambda bn, z: jax.nn.relu(bn + z), {"bn_add_relu": 1}),
    "z + bn": (lambda bn, z: jax.nn.relu(z + bn), {"bn_add_relu": 1}),
    "sum()": (lambda bn, z: jax.nn.relu(sum([bn, z])), {"bn_add_relu": 1}),  # type: ignore[arg-type]
    "three": (lambda bn, z: jax.nn.relu(z + bn + jnp.sin(z)), {"bn_add_relu": 1}),
    "three right": (lambda bn, z: jax.nn.relu(jnp.sin(z) + (z + bn)), {"bn_add_relu": 1}),
    "jitted relu": (lambda bn, z: jax.jit(jax.nn.relu)(bn + z), {"bn_add_relu": 1}),
    "jitted join": (
        lambda bn, z: jax.jit(lambda a, b: jax.nn.relu(a + b))(z, bn),
        {"bn_add_relu": 1},
    ),
    "sum": (lambda bn, z: z + bn, {"bn_act": 1}),
    "sum of three": (lambda bn, z: z + bn + jnp.sin(z), {"bn_act": 1}),
    "sum read twice": (lambda bn, z: jnp.sin(bn + z) * (bn + z), {"batch_norm": 1}),
    "one sum read twice": (lambda bn, z: (lambda s: jnp.sin(s) * s)(bn + z), {"bn_act": 1}),
    "sum that is returned": (lambda bn, z: (lambda s: (s, s @ s.mT))(bn + z), {"bn_act": 1}),
    "maximum": (lambda bn, z: jnp.maximum(bn + z, 0), {"bn_act": 1}),
    "softplus": (lambda bn, z: jax.nn.softplus(bn), {"batch_norm": 1}),
    "gate": (lambda bn, z: jax.nn.relu(bn * jax.nn.sigmoid(z) + z), {"batch_norm": 1}),
    "subtract": (lambda bn, z: jax.nn.relu(bn - z), {"batch_norm": 1}),
    "pool": (lambda bn, z: jax.nn.relu(bn.mean((1, 2))), {"batch_norm": 1}),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails(name: str) -> None:
    tail, counts = TAILS[name]

    def layer(x: jax.Array, z: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return tail(batch_norm(x, scale, bias), z)

    assert_fused(layer, X, Z, SCALE, BIAS, **counts)


def test_join_of_two_epsilons() -> None:
    """A call has a single epsilon, so this takes two calls."""

    def join(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        other = (z - z.mean(AXES, keepdims=True)) / jnp.sqrt(z.var(AXES, keepdims=True) + 1e-5)
        return jax.nn.relu(batch_norm(x, scale, bias) + other)

    assert_fused(join, X, Z, SCALE, BIAS, bn_add_relu=1, batch_norm=1)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["", "jit"])
def test_numbers_that_are_arrays(around: Any) -> None:
    """The program holds them, so their values are known: `jnp.float32(...)` is an array of JAX."""
    epsilon, count = jnp.float32(1e-3), jnp.asarray(COUNT, jnp.float32)

    def layer(x: Any, scale: Any, bias: Any) -> jax.Array:
        mean = x.sum(AXES) / count.astype(x.dtype)
        var = jnp.square(x - vector(mean)).sum(AXES) / count.astype(x.dtype)
        factor = scale * lax.rsqrt(var + epsilon.astype(x.dtype))
        return jax.nn.relu((x - vector(mean)) * vector(factor) + vector(bias))

    assert_fused(around(layer), X, SCALE, BIAS, bn_relu=1)


def test_other_numbers_in_the_same_jaxpr() -> None:
    """Two closed jaxprs may share an open one."""
    epsilon = jnp.float32(0.5)

    def layer(x: jax.Array) -> jax.Array:
        y = (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True) + epsilon)
        return lax.cumsum(jax.nn.relu(y))  # so that the call is not inlined

    rows = jax.random.normal(jax.random.key(0), (12, 4), jnp.float32)
    call = jax.make_jaxpr(jax.jit(layer))(rows).eqns[0]
    one: Any = jax.make_jaxpr(layer)(rows)
    assert len(one.consts) == 1
    both = (one, one.replace(consts=[jnp.float32(5.0)]))

    def two_calls(x: jax.Array) -> Any:
        return [call.primitive.bind(x, **call.params | {"jaxpr": each})[0] for each in both]

    assert kernels(jax_bnar.fuse(two_calls), rows) == 2
    for ours, plain in zip(jax_bnar.fuse(two_calls)(rows), two_calls(rows), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_preactivation_of_a_residual_sum() -> None:
    """x is itself a sum, which the shortcut reads as well."""

    def block(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
        total = x + z
        return jax.nn.relu(batch_norm(total, scale, bias)), total

    assert_fused(block, X, Z, SCALE, BIAS, bn_relu=1)


def test_x_is_its_own_residual() -> None:
    def block(x: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(batch_norm(x, scale, bias) + x)

    assert_fused(block, X, SCALE, BIAS, bn_add_relu=1)


def test_running_statistics() -> None:
    """They only read the batch statistics: an unbiased variance, and a separate mean of squares."""

    def layer(x: Any, scale: Any, bias: Any, old: Any) -> Any:
        mean = x.mean(AXES)
        squares = (x * x).mean(AXES)
        var = squares - mean * mean
        unbiased = var * (COUNT / (COUNT - 1))
        y = jax.nn.relu(normalise(x, mean, var, scale, bias))
        std = jnp.sqrt(var + 1e-3)
        return y, 0.9 * old + 0.1 * mean, 0.9 * old + 0.1 * unbiased, squares, std

    assert_fused(layer, X, SCALE, BIAS, SCALE, bn_relu=1)


def test_scalar_gains_are_part_of_the_scale() -> None:
    def layer(x: Any, scale: Any, bias: Any, gain: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias) * gain * 2.0)

    assert_fused(layer, X, SCALE, BIAS, array((), 4), bn_relu=1)


def test_zero_scale_makes_exact_zeros() -> None:
    """The derivative of ReLU at exactly 0 is 0, so there is no gradient where z is 0 as well."""
    scale = jnp.zeros(3, jnp.float32)
    z = jnp.where(Z > 0.5, Z, 0)

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias) + z)

    assert_fused(layer, X, z, scale, scale, bn_add_relu=1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values(value: float) -> None:
    """They are passed in z, because a statistic of them would be NaN in any spelling."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias) + z)

    assert_fused(layer, X, Z.at[1, 2, 3].set(value), SCALE, BIAS, bn_add_relu=1)


def test_affine_forms() -> None:
    def given(x: Any, z: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        return jax.nn.relu(normalise(x, mean, var, scale, bias) + z)

    args = (X, Z, SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_fused(given, *args, bn_add_relu_inference=1)

    def slope(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(z + (x * vector(scale) + vector(bias)))

    assert_fused(slope, X, Z, SCALE, BIAS, bn_add_relu_inference=1)

    def divided_by_std(x: Any, mean: Any, var: Any) -> Any:
        return jax.nn.relu((x - vector(mean)) / jnp.sqrt(vector(var) + 1e-3))

    assert_fused(divided_by_std, X, BIAS, jnp.abs(SCALE), bn_relu_inference=1)


@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_affine_in_bfloat16(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left alone, because no platform gains by fusing it."""

    def given(x: Any, z: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        inside = jnp.dtype(wide) if x.dtype == jnp.bfloat16 else x.dtype
        vectors = (v.astype(inside) for v in (mean, var, scale, bias))
        return jax.nn.relu(normalise(x.astype(inside), *vectors).astype(x.dtype) + z)

    args = (X.astype("bfloat16"), Z.astype("bfloat16"), SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_untouched(given, *args, reason="fast as XLA compiles it")
    monkeypatch.setattr(affine, "pays", lambda dtype: True)
    assert_fused(given, *args, bn_add_relu_inference=1)


def test_evaluation_is_never_taken_for_training() -> None:
    def both(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(normalise(x, mean, var, scale, bias)), x.mean(AXES), x.var(AXES)

    counts = operators(both, X, BIAS, jnp.abs(SCALE), SCALE, BIAS)
    assert counts == {"bn_relu_inference": 1}


def rows_of_channels(x: jax.Array) -> jax.Array:
    """Channels on axis 0, as in many programs that sum along rows."""
    rows = x.swapaxes(0, -1).reshape(x.shape[-1], -1)
    mean = rows.mean(1, keepdims=True)
    return (rows - mean) / jnp.sqrt(rows.var(1, keepdims=True) + 1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_channels_on_the_first_axis(dtype: str) -> None:
    def layer(x: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(rows_of_channels(x) * scale[:, None] + bias[:, None])

    assert_fused(layer, *(a.astype(dtype) for a in (X, SCALE, BIAS)), bn_relu=1)


def test_one_parameter_tells_channels_from_examples() -> None:
    def with_bias(x: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(rows_of_channels(x) + bias[:, None])

    def without(x: Any) -> jax.Array:
        return jax.nn.relu(rows_of_channels(x))

    assert_fused(with_bias, X, BIAS, bn_relu=1)
    assert_untouched(without, X, reason="those of each example")
