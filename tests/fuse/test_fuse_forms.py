"""Every spelling of BatchNorm in training that `fuse` takes, and what follows it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, assert_fused, assert_untouched, operators
from jax import lax

import jax_bnar
from jax_bnar._fuse import affine

X = array((6, 5, 4, 3))
Z = array((6, 5, 4, 3), 1)
SCALE = array((3,), 2)
BIAS = array((3,), 3)
AXES = (0, 1, 2)
COUNT = 6 * 5 * 4

Statistics = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
Normalise = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _vector(v: jax.Array) -> jax.Array:
    return v.reshape(1, 1, 1, -1)


def two_pass(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES)
    return mean, jnp.mean(jnp.square(x - _vector(mean)), AXES)


def library(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.mean(x, AXES), jnp.var(x, AXES)


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
    return mean, jnp.sum((x - _vector(mean)) ** 2, AXES) / count


def by_reciprocal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = x.sum(AXES) * (1 / COUNT)
    return mean, jnp.sum((x - _vector(mean)) ** 2, AXES) * (1 / COUNT)


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
    library,
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


def plain(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    xhat = (x - _vector(mean)) * lax.rsqrt(_vector(var) + 1e-3)
    return xhat * _vector(scale) + _vector(bias)


def vectors_first(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    slope = lax.rsqrt(var.reshape(-1) + 1e-3) * scale
    return (x - _vector(mean)) * _vector(slope) + _vector(bias)


def scale_first(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return (x - _vector(mean)) * (_vector(scale) * lax.rsqrt(_vector(var) + 1e-3)) + _vector(bias)


def folded(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    slope = scale * lax.rsqrt(var.reshape(-1) + 1e-3)
    return x * _vector(slope) + _vector(bias - mean.reshape(-1) * slope)


def folded_the_other_way(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    slope = scale / jnp.sqrt(var.reshape(-1) + 1e-3)
    return _vector(bias) - _vector(slope * mean.reshape(-1)) + _vector(slope) * x


def divided(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return (x - _vector(mean)) / jnp.sqrt(_vector(var) + 1e-3) * _vector(scale) + _vector(bias)


def by_power(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return _vector(scale) * (x - _vector(mean)) * (_vector(var) + 1e-3) ** -0.5 + _vector(bias)


def by_reciprocal_of_std(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    std = jnp.sqrt(1e-3 + _vector(var))
    return _vector(bias) + _vector(scale) * ((x - _vector(mean)) * (1 / std))


def centred_at_zero(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    """The scale is stored as its difference from 1."""
    xhat = (x - _vector(mean)) * lax.rsqrt(_vector(var) + 1e-3)
    return xhat * _vector(1.0 + scale) + _vector(bias)


def without_parameters(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    return (x - _vector(mean)) * lax.rsqrt(_vector(var) + 1e-3)


def negated(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    xhat = -(_vector(mean) - x) * lax.rsqrt(_vector(var) + 1e-3)
    return _vector(bias) - xhat * -_vector(scale)


def through_jits(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    @jax.jit
    def standardize(x: Any, mean: Any, var: Any) -> Any:
        return (x - mean) * lax.rsqrt(var + 1e-3)

    affine = jax.jit(lambda a, s, b: a * s + b)
    return affine(standardize(x, _vector(mean), _vector(var)), _vector(scale), _vector(bias))


NORMALISATIONS = [
    plain,
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
@pytest.mark.parametrize("normalise", [plain, folded], ids=lambda f: f.__name__)
def test_statistics(statistics: Statistics, normalise: Normalise) -> None:
    def layer(x: jax.Array, z: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        mean, var = statistics(x)
        return jax.nn.relu(normalise(x, mean, var, scale, bias) + z)

    assert_fused(layer, X, Z, SCALE, BIAS, bn_add_relu=1)


@pytest.mark.parametrize("normalise", NORMALISATIONS, ids=lambda f: f.__name__)
def test_normalisations(normalise: Normalise) -> None:
    def layer(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.relu(normalise(x, *library(x), scale, bias))

    assert_fused(layer, X, SCALE, BIAS, bn_relu=1)


def _batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return plain(x, *library(x), scale, bias)


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
    "maximum": (lambda bn, z: jnp.maximum(bn + z, 0), {"batch_norm": 1}),
    "gelu": (lambda bn, z: jax.nn.gelu(bn), {"batch_norm": 1}),
    "gate": (lambda bn, z: jax.nn.relu(bn * jax.nn.sigmoid(z) + z), {"batch_norm": 1}),
    "subtract": (lambda bn, z: jax.nn.relu(bn - z), {"batch_norm": 1}),
    "pool": (lambda bn, z: jax.nn.relu(bn.mean((1, 2))), {"batch_norm": 1}),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails(name: str) -> None:
    tail, counts = TAILS[name]

    def layer(x: jax.Array, z: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return tail(_batch_norm(x, scale, bias), z)

    assert_fused(layer, X, Z, SCALE, BIAS, **counts)


def test_join_of_two() -> None:
    def join(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(_batch_norm(x, scale, bias) + _batch_norm(z, bias, scale))

    assert_fused(join, X, Z, SCALE, BIAS, dual_bn_add_relu=1)


def test_join_of_two_epsilons() -> None:
    """A call has a single epsilon, so this takes two calls."""

    def join(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        other = (z - z.mean(AXES, keepdims=True)) / jnp.sqrt(z.var(AXES, keepdims=True) + 1e-5)
        return jax.nn.relu(_batch_norm(x, scale, bias) + other)

    assert_fused(join, X, Z, SCALE, BIAS, bn_add_relu=1, batch_norm=1)


def test_preactivation_of_a_residual_sum() -> None:
    """x is itself a sum, which the shortcut reads as well."""

    def block(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
        total = x + z
        return jax.nn.relu(_batch_norm(total, scale, bias)), total

    assert_fused(block, X, Z, SCALE, BIAS, bn_relu=1)


def test_x_is_its_own_residual() -> None:
    def block(x: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(_batch_norm(x, scale, bias) + x)

    assert_fused(block, X, SCALE, BIAS, bn_add_relu=1)


def test_running_statistics() -> None:
    """They only read the batch statistics: an unbiased variance, and a separate mean of squares."""

    def layer(x: Any, scale: Any, bias: Any, old: Any) -> Any:
        mean = x.mean(AXES)
        squares = (x * x).mean(AXES)
        var = squares - mean * mean
        unbiased = var * (COUNT / (COUNT - 1))
        y = jax.nn.relu(plain(x, mean, var, scale, bias))
        std = jnp.sqrt(var + 1e-3)
        return y, 0.9 * old + 0.1 * mean, 0.9 * old + 0.1 * unbiased, squares, std

    assert_fused(layer, X, SCALE, BIAS, SCALE, bn_relu=1)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7, 3), 1),
        ((7, 5, 3), 2),
        ((7, 3, 5), 1),
        ((2, 3, 4, 5), 1),
        ((2, 4, 5, 3), 3),
        ((2, 3, 4, 5, 2), 1),
        ((2, 4, 5, 2, 3), 4),
        ((2, 5, 3, 4), 2),
        ((1, 5, 4, 3), 3),
        ((6, 1, 1, 3), 3),
        ((6, 5, 4, 1), 3),
        ((6, 1), 1),
    ],
)
def test_layouts(shape: tuple[int, ...], axis: int) -> None:
    axes = tuple(a for a in range(len(shape)) if a != axis)

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        mean = x.mean(axes, keepdims=True)
        var = x.var(axes, keepdims=True)
        vector = [1] * x.ndim
        vector[axis] = -1
        xhat = (x - mean) * lax.rsqrt(var + 1e-3)
        return jax.nn.relu(xhat * scale.reshape(vector) + bias.reshape(vector) + z)

    vectors = array((shape[axis],), 2), array((shape[axis],), 3)
    assert_fused(layer, array(shape), array(shape, 1), *vectors, bn_add_relu=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_dtypes(dtype: str, is_mixed: bool) -> None:
    """Mixed means arithmetic in float32, as in Flax; otherwise all is in x's dtype, as in Haiku."""
    wide = jnp.float32 if is_mixed and dtype != "float64" else jnp.dtype(dtype)

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        dtype = x.dtype
        inside = wide if dtype != jnp.float64 else jnp.float64
        x = x.astype(inside)
        mean = x.mean(AXES, keepdims=True)
        var = x.var(AXES, keepdims=True)
        scale, bias = _vector(scale).astype(inside), _vector(bias).astype(inside)
        y = (x - mean) * (lax.rsqrt(var + 1e-3) * scale) + bias
        return jax.nn.relu(y.astype(dtype) + z)

    x, z = X.astype(dtype), Z.astype(dtype)
    assert_fused(layer, x, z, SCALE, BIAS, bn_add_relu=1)


def test_ghost_batch() -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        groups = x.reshape(2, 3, *x.shape[1:])
        mean = groups.mean((1, 2, 3), keepdims=True)
        var = groups.var((1, 2, 3), keepdims=True)
        xhat = ((groups - mean) * lax.rsqrt(var + 1e-3)).reshape(x.shape)
        running = mean.mean(0).reshape(-1), var.mean(0).reshape(-1)
        return jax.nn.relu(xhat * _vector(scale) + _vector(bias) + z), running

    assert_fused(layer, X, Z, SCALE, BIAS, bn_add_relu=1)


def test_ghost_batch_undone_last() -> None:
    """The parameters are applied while the groups are still apart."""

    def layer(x: Any, scale: Any, bias: Any) -> Any:
        groups = x.reshape(3, 2, *x.shape[1:])
        mean = groups.mean((1, 2, 3), keepdims=True)
        var = groups.var((1, 2, 3), keepdims=True)
        scale, bias = scale.reshape(1, 1, 1, 1, -1), bias.reshape(1, 1, 1, 1, -1)
        y = (groups - mean) * lax.rsqrt(var + 1e-3) * scale + bias
        return jax.nn.relu(y.reshape(x.shape))

    assert_fused(layer, X, SCALE, BIAS, bn_relu=1)


def test_scalar_gains_are_part_of_the_scale() -> None:
    def layer(x: Any, scale: Any, bias: Any, gain: Any) -> Any:
        return jax.nn.relu(_batch_norm(x, scale, bias) * gain * 2.0)

    assert_fused(layer, X, SCALE, BIAS, array((), 4), bn_relu=1)


def test_zero_scale_makes_exact_zeros() -> None:
    """The derivative of ReLU at exactly 0 is 0, so there is no gradient where z is 0 as well."""
    scale = jnp.zeros(3, jnp.float32)
    z = jnp.where(Z > 0.5, Z, 0)

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(_batch_norm(x, scale, bias) + z)

    assert_fused(layer, X, z, scale, scale, bn_add_relu=1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values(value: float) -> None:
    """They are passed in z, because a statistic of them would be NaN in any spelling."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(_batch_norm(x, scale, bias) + z)

    assert_fused(layer, X, Z.at[1, 2, 3].set(value), SCALE, BIAS, bn_add_relu=1)


def test_affine_forms() -> None:
    def given(x: Any, z: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        return jax.nn.relu(plain(x, mean, var, scale, bias) + z)

    args = (X, Z, SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_fused(given, *args, bn_add_relu_inference=1)

    def slope(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(z + (x * _vector(scale) + _vector(bias)))

    assert_fused(slope, X, Z, SCALE, BIAS, bn_add_relu_inference=1)

    def divided_by_std(x: Any, mean: Any, var: Any) -> Any:
        return jax.nn.relu((x - _vector(mean)) / jnp.sqrt(_vector(var) + 1e-3))

    assert_fused(divided_by_std, X, BIAS, jnp.abs(SCALE), bn_relu_inference=1)


@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_affine_in_bfloat16(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left alone on a CPU, where fusing it does not pay."""

    def given(x: Any, z: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        inside = jnp.dtype(wide) if x.dtype == jnp.bfloat16 else x.dtype
        vectors = (v.astype(inside) for v in (mean, var, scale, bias))
        return jax.nn.relu(plain(x.astype(inside), *vectors).astype(x.dtype) + z)

    args = (X.astype("bfloat16"), Z.astype("bfloat16"), SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_untouched(given, *args, reason="faster as XLA compiles it")
    monkeypatch.setattr(affine, "pays", lambda dtype: True)
    assert_fused(given, *args, bn_add_relu_inference=1)


def test_evaluation_is_never_taken_for_training() -> None:
    def both(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(plain(x, mean, var, scale, bias)), x.mean(AXES), x.var(AXES)

    counts = operators(both, X, BIAS, jnp.abs(SCALE), SCALE, BIAS)
    assert counts == {"bn_relu_inference": 1}


def test_transposed_before_it_is_normalised() -> None:
    """The result has the axes of x in another order, and so has z."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = plain(jnp.transpose(x, (2, 0, 1, 3)), *library(x), scale, bias)
        return jax.nn.relu(y + jnp.sin(jnp.transpose(z, (2, 0, 1, 3))))

    assert_fused(layer, X, Z, SCALE, BIAS, bn_add_relu=1)

    def channels_moved(x: Any, scale: Any, bias: Any) -> Any:
        mean, var = x.mean(AXES)[:, None, None], x.var(AXES)[:, None, None]
        xhat = (jnp.transpose(x, (0, 3, 1, 2)) - mean[None]) * lax.rsqrt(var + 1e-3)[None]
        return jax.nn.relu(xhat * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1))

    assert_fused(channels_moved, X, SCALE, BIAS, bn_relu=1)


def _with_bias(x: Any, kernel: Any, shift: Any, scale: Any, bias: Any, old: Any) -> Any:
    """A convolution as in Keras or stax, with a bias that BatchNorm removes again."""
    x = jnp.einsum("nhwc,cd->nhwd", x, kernel) + _vector(shift)
    mean, var = x.mean(AXES), x.var(AXES)
    y = jax.nn.relu(plain(x, mean, var, scale, bias))
    return y, 0.9 * old + 0.1 * mean, 0.9 * old + 0.1 * var, (x * x).mean(AXES)


def test_bias_before_the_norm() -> None:
    """The bias cancels, so the array with the bias is not computed; only the mean contains it."""
    arguments = (X, jnp.outer(SCALE, BIAS), 3 * BIAS, SCALE, BIAS, SCALE)
    assert_fused(_with_bias, *arguments, bn_relu=1)
    equations = jax.make_jaxpr(jax_bnar.fuse(_with_bias))(*arguments).jaxpr.eqns
    whole = [e.primitive.name for e in equations if e.outvars[0].aval.shape == X.shape]
    assert whole == ["dot_general", "custom_jvp_call"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bias_before_the_norm_that_is_not_finite(value: float) -> None:
    arguments = (X, jnp.outer(SCALE, BIAS), BIAS.at[1].set(value), SCALE, BIAS, SCALE)
    expected = jax.jit(_with_bias)(*arguments)
    given = jax.jit(jax_bnar.fuse(_with_bias))(*arguments)
    for a, b in zip(given, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_bias_before_the_norm_that_is_read_elsewhere() -> None:
    """The array with the bias exists anyway, so it is normalised as it is."""

    def layer(x: Any, shift: Any, scale: Any, bias: Any) -> Any:
        x = x + _vector(shift)
        return jax.nn.relu(_batch_norm(x, scale, bias)), jnp.sin(x)

    assert_fused(layer, X, BIAS, SCALE, BIAS, bn_relu=1)

    def example(x: Any, shift: Any, scale: Any, bias: Any) -> Any:
        """The shift is not a vector over the channels, so it does not cancel."""
        return jax.nn.relu(_batch_norm(x + shift, scale, bias))

    assert_fused(example, X, X[:, :1, :1], SCALE, BIAS, bn_relu=1)


def test_bias_before_both_norms_of_a_join() -> None:
    def join(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        first, second = x + _vector(bias), z + _vector(scale)
        means = first.mean(AXES), second.mean(AXES)
        return jax.nn.relu(
            _batch_norm(first, scale, bias) + _batch_norm(second, bias, scale)
        ), means

    assert_fused(join, X, Z, SCALE, BIAS, dual_bn_add_relu=1)


def test_bias_before_the_norm_of_evaluation() -> None:
    def given(x: Any, shift: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        return jax.nn.relu(plain(x + _vector(shift), mean, var, scale, bias))

    arguments = (X, SCALE, SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_fused(given, *arguments, bn_relu_inference=1)
    equations = jax.make_jaxpr(jax_bnar.fuse(given))(*arguments).jaxpr.eqns
    assert sum(e.outvars[0].aval.shape == X.shape for e in equations) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_wider_than_x(dtype: str) -> None:
    """Flax with float32 parameters and no dtype first widens x, which is exact."""

    def layer(x: Any, z: Any, scale: Any, bias: Any, old: Any) -> Any:
        wide = x.astype(old.dtype)
        mean, var = wide.mean(AXES), wide.var(AXES)
        y = jax.nn.relu(plain(x.astype(old.dtype), mean, var, scale, bias) + z)
        return y, 0.9 * old + 0.1 * var

    assert_fused(layer, X.astype(dtype), Z, SCALE, BIAS, SCALE, bn_add_relu=1)

    def join(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        x = x.astype(scale.dtype)
        return jax.nn.relu(_batch_norm(x, scale, bias) + _batch_norm(z, bias, scale))

    assert_fused(join, X.astype(dtype), Z, SCALE, BIAS, dual_bn_add_relu=1)


def test_a_residual_of_one_vector_is_part_of_the_bias() -> None:
    """The kernel's residual must be a whole array, but a vector over channels joins the bias."""

    def layer(x: Any, vector: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(_batch_norm(x, scale, bias) + vector)

    assert_fused(layer, X, array((1, 1, 1, 3), 4), SCALE, BIAS, bn_relu=1)
    infinite = array((1, 1, 1, 3), 4).at[..., 1].set(np.inf)
    assert_fused(layer, X, infinite, SCALE, BIAS, bn_relu=1)
