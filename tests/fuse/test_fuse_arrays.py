"""The layouts, dtypes and groups of the BatchNorms that `fuse` takes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fuse_operands import AXES, BIAS, SCALE, X, Z, batch_norm, moments, normalise, vector
from fuse_tools import array, assert_fused, operators
from jax import lax

import jax_bnar


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
        scale, bias = vector(scale).astype(inside), vector(bias).astype(inside)
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
        return jax.nn.relu(xhat * vector(scale) + vector(bias) + z), running

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


def test_transposed_before_it_is_normalised() -> None:
    """The result has the axes of x in another order, and so has z."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = normalise(jnp.transpose(x, (2, 0, 1, 3)), *moments(x), scale, bias)
        return jax.nn.relu(y + jnp.sin(jnp.transpose(z, (2, 0, 1, 3))))

    assert_fused(layer, X, Z, SCALE, BIAS, bn_add_relu=1)

    def channels_moved(x: Any, scale: Any, bias: Any) -> Any:
        mean, var = x.mean(AXES)[:, None, None], x.var(AXES)[:, None, None]
        xhat = (jnp.transpose(x, (0, 3, 1, 2)) - mean[None]) * lax.rsqrt(var + 1e-3)[None]
        return jax.nn.relu(xhat * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1))

    assert_fused(channels_moved, X, SCALE, BIAS, bn_relu=1)


@pytest.mark.parametrize("is_new", [False, True])
def test_repeated_after_it_is_normalised(is_new: bool) -> None:
    """The image pooling of ASPP repeats its norm over the picture; others repeat it for a head."""

    def layer(x: Any, scale: Any, bias: Any) -> Any:
        y = normalise(x, *moments(x), scale, bias)
        y = jnp.broadcast_to(y[None], (2, *y.shape)) if is_new else jnp.repeat(y, 2, 1)
        return jax.nn.relu(y)

    assert_fused(layer, X, SCALE, BIAS, batch_norm=1)

    def pooled(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, other = (normalise(a, *moments(a), scale, bias) for a in (x, z))
        return jax.nn.relu(jnp.broadcast_to(y, z.shape)) + jax.nn.relu(other)

    assert_fused(pooled, X[:, :1, :1], Z, SCALE, BIAS, batch_norm=1, bn_relu=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_wider_than_x(dtype: str) -> None:
    """Flax with float32 parameters and no dtype first widens x, which is exact."""

    def layer(x: Any, z: Any, scale: Any, bias: Any, old: Any) -> Any:
        wide = x.astype(old.dtype)
        mean, var = wide.mean(AXES), wide.var(AXES)
        y = jax.nn.relu(normalise(x.astype(old.dtype), mean, var, scale, bias) + z)
        return y, 0.9 * old + 0.1 * var

    assert_fused(layer, X.astype(dtype), Z, SCALE, BIAS, SCALE, bn_add_relu=1)

    def join(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        x = x.astype(scale.dtype)
        return jax.nn.relu(batch_norm(x, scale, bias) + batch_norm(z, bias, scale))

    assert_fused(join, X.astype(dtype), Z, SCALE, BIAS, dual_bn_add_relu=1)


def _normalised(x: jax.Array) -> jax.Array:
    xhat = x - x.mean(AXES, keepdims=True)
    return xhat * lax.rsqrt(x.var(AXES, keepdims=True) + 1e-3)


CONCATENATIONS = {
    "channels": lambda a, b: jnp.concatenate([a, b], -1),
    "batch": lambda a, b: jnp.concatenate([a, b], 0),
    "rows": lambda a, b: jnp.concatenate([a, b], 1),
    "an array and itself": lambda a, b: jnp.concatenate([a, a], 2),
    "stacked": lambda a, b: jnp.stack([a, b]).reshape(2 * a.shape[0], *a.shape[1:]),
}


@pytest.mark.parametrize("parts_are_normalised", [False, True])
@pytest.mark.parametrize("name", CONCATENATIONS)
def test_concatenations(name: str, parts_are_normalised: bool) -> None:
    """As in DenseNet, where norms follow of a part and of the whole."""

    def network(a: Any, b: Any) -> Any:
        x = CONCATENATIONS[name](a, b)
        y = jax.nn.relu(_normalised(x))
        return (y, jax.nn.relu(_normalised(a))) if parts_are_normalised else y

    assert_fused(network, X, Z, bn_relu=2 if parts_are_normalised else 1)


def test_two_norms_of_one_array() -> None:
    """Two heads, each with its own parameters, and one of them of another view of the array."""

    def heads(x: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias)), batch_norm(x, bias, scale)

    def views(x: Any, scale: Any, bias: Any) -> Any:
        view = x.transpose(0, 3, 1, 2).transpose(0, 2, 3, 1)
        return jax.nn.relu(batch_norm(x, scale, bias)), jax.nn.relu(batch_norm(view, bias, scale))

    def joined(x: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias) + batch_norm(x, bias, scale))

    def with_shared_statistics(x: Any, scale: Any, bias: Any) -> Any:
        mean, var = moments(x)
        y = jax.nn.relu(normalise(x, mean, var, scale, bias))
        return y, normalise(x, mean, var, bias, scale), mean, var

    assert_fused(heads, X, SCALE, BIAS, bn_relu=1, batch_norm=1)
    assert_fused(views, X, SCALE, BIAS, bn_relu=2)
    assert_fused(joined, X, SCALE, BIAS, bn_relu=1)  # by the sum of the scales
    assert_fused(with_shared_statistics, X, SCALE, BIAS, bn_relu=1, batch_norm=1)


def test_a_part_of_a_norm_is_no_norm_that_is_refused() -> None:
    """x minus its mean, of which the variance is taken, has a mean of its own, which is 0."""

    def layer(x: Any) -> Any:
        centred = x - x.mean(AXES, keepdims=True)
        return jax.nn.relu(centred / jnp.sqrt((centred**2).mean(AXES, keepdims=True) + 1e-3))

    assert_fused(layer, X, bn_relu=1)
    assert not jax_bnar.explain(layer)(X).refused


def test_what_nobody_reads_is_no_use_of_an_array() -> None:
    def training(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias)
        jnp.abs(y).max()
        (y + z).sum()
        return jax.nn.relu(y + z)

    def evaluation(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        a = x * vector(scale) + vector(bias) + z
        a.mean(AXES)
        return jax.nn.relu(a)

    def with_an_effect(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias) + z
        jax.debug.callback(lambda largest: None, y.max())
        return jax.nn.relu(y)

    assert_fused(training, X, Z, SCALE, BIAS, bn_add_relu=1)
    assert_fused(evaluation, X, Z, SCALE, BIAS, bn_add_relu_inference=1)

    def with_an_effect_inside(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        mean, var = moments(x)
        centred = (x - vector(mean)) * lax.rsqrt(vector(var) + 1e-3)
        jax.debug.callback(lambda array: None, centred)
        return jax.nn.relu(centred * vector(scale) + vector(bias) + z)

    for function in (with_an_effect, with_an_effect_inside):
        assert not operators(function, X, Z, SCALE, BIAS).get("bn_add_relu")


@pytest.mark.parametrize("shortcut_first", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_what_follows_a_join(shortcut_first: bool, turned: bool) -> None:
    def network(x: Any, scale: Any, bias: Any) -> Any:
        if shortcut_first:
            z = batch_norm(jnp.sin(x), bias, scale)
            y = batch_norm(jnp.cos(x), scale, bias)
        else:
            y = batch_norm(jnp.cos(x), scale, bias)
            z = batch_norm(jnp.sin(x), bias, scale)
        h = jax.nn.relu(z + y if turned else y + z)
        return jax.nn.relu(batch_norm(jnp.tanh(h), scale, bias))

    assert_fused(network, X, SCALE, BIAS, dual_bn_add_relu=1, bn_relu=1)
