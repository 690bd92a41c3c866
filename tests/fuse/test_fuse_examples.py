"""InstanceNorm: each example has statistics of its own, and all share the scale and the bias."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_operands import programs_of
from fuse_tools import array, assert_fused, assert_untouched, operators
from jax import export, lax
from jax.sharding import PartitionSpec as P
from sharding_tools import MeshKind, collectives, make_mesh, put, use_mesh

import jax_bnar

X = array((6, 5, 8, 3))
Z = array((6, 5, 8, 3), 1)
SCALE = array((3,), 2)
BIAS = array((3,), 3)
VECTOR = (1, 1, 1, 3)


def instance_norm(x: Any, scale: Any, bias: Any, axis: int = -1) -> jax.Array:
    """The channels are on `axis`; `scale` and `bias` may be None."""
    axis %= x.ndim
    axes = tuple(a for a in range(1, x.ndim) if a != axis)
    vector = [1] * x.ndim
    vector[axis] = -1
    y = (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-3)
    y = y if scale is None else y * scale.reshape(vector)
    return y if bias is None else y + bias.reshape(vector)


relu_of, join, dual_join = programs_of(instance_norm)


def leaky(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.leaky_relu(instance_norm(x, scale, bias) + z, 0.01)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("program", "operator"),
    [(join, "bn_add_relu"), (dual_join, "dual_bn_add_relu"), (leaky, "bn_act")],
)
def test_operators(program: Callable[..., Any], operator: str) -> None:
    assert_fused(program, X, Z, SCALE, BIAS, **{operator: 1})


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 32, 3), 2),
        ((2, 3, 32), 1),
        ((2, 3, 5, 8), 1),
        ((2, 4, 3, 5, 3), 4),
        ((2, 3, 4, 3, 5), 1),
        ((2, 40, 1, 3), 3),
    ],
)
def test_layouts(shape: tuple[int, ...], axis: int) -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(instance_norm(x, scale, bias, axis) + z)

    vectors = array((3,), 2), array((3,), 3)
    assert_fused(layer, array(shape), array(shape, 1), *vectors, bn_add_relu=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype: str) -> None:
    assert_fused(join, *(a.astype(dtype) for a in (X, Z, SCALE, BIAS)), bn_add_relu=1)


def test_parameters() -> None:
    """Neither is needed where the channels come last."""
    assert_fused(lambda x: relu_of(x, None, None), X, bn_relu=1)
    assert_fused(lambda x, scale: relu_of(x, scale, None), X, SCALE, bn_relu=1)
    assert_fused(lambda x, bias: relu_of(x, None, bias), X, BIAS, bn_relu=1)


def test_a_bias_before_the_norm_and_statistics_that_are_kept() -> None:
    """As that of a convolution; networks for videos keep averages of the examples' statistics."""

    def layer(x: Any, shift: Any, scale: Any, running: Any) -> Any:
        x = x + shift.reshape(VECTOR)
        y = jax.nn.relu(instance_norm(x, scale, None))
        return y, 0.9 * running + 0.1 * x.mean((1, 2)).mean(0), x.var((1, 2))

    assert_fused(layer, X, BIAS, SCALE, BIAS, bn_relu=1)
    assert not jax_bnar.explain(layer)(X, BIAS, SCALE, BIAS).refused


def test_a_vmap_over_examples() -> None:
    """A BatchNorm under a `vmap` that shares its parameters is the same arithmetic."""

    def norm(x: Any, scale: Any, bias: Any) -> jax.Array:
        mean, var = x.mean((0, 1), keepdims=True), x.var((0, 1), keepdims=True)
        y = (x - mean) * lax.rsqrt(var + 1e-3)
        return jax.nn.relu(y * scale.reshape(VECTOR[1:]) + bias.reshape(VECTOR[1:]))

    assert_fused(jax.vmap(norm, (0, None, None)), X, SCALE, BIAS, bn_relu=1)


def test_adaptive_parameters() -> None:
    """Those of each example and channel, as a style gives them, are those of an ensemble."""

    def layer(x: Any, style: Any) -> Any:
        scale, bias = jnp.split(style[:, None, None], 2, -1)
        return jax.nn.relu(instance_norm(x, None, None) * (1 + scale) + bias)

    assert_fused(layer, X, array((6, 6), 4), bn_relu=1)


class _Linen(nn.Module):
    norm: nn.Module

    @nn.compact
    def __call__(self, x: Any, z: Any) -> Any:
        return nn.relu(self.norm(x) + z)


@pytest.mark.parametrize(
    "norm",
    [
        nn.InstanceNorm(),
        nn.InstanceNorm(use_fast_variance=False, use_scale=False),
        nn.GroupNorm(num_groups=None, group_size=1),
    ],
    ids=["instance norm", "in two passes", "groups of one channel"],
)
def test_linen(norm: nn.Module) -> None:
    layer = _Linen(norm)
    variables = layer.init(jax.random.key(0), X, Z)
    with jax.numpy_dtype_promotion("standard"):
        assert_fused(layer.apply, variables, X, Z, bn_add_relu=1)


def test_nnx() -> None:
    graph, state = nnx.split(nnx.InstanceNorm(3, rngs=nnx.Rngs(0)))

    def layer(state: Any, x: Any) -> Any:
        return nnx.leaky_relu(nnx.merge(graph, state)(x), 0.2)

    with jax.numpy_dtype_promotion("standard"):
        assert_fused(layer, state, X, bn_act=1)


def test_haiku() -> None:
    layer = hk.without_apply_rng(
        hk.transform(
            lambda x: jax.nn.relu(hk.InstanceNorm(create_scale=True, create_offset=True)(x))
        )
    )
    assert_fused(layer.apply, layer.init(jax.random.key(0), X), X, bn_relu=1)


def test_equinox() -> None:
    """Its GroupNorm takes one example, whose channels come first."""
    norm = eqx.nn.GroupNorm(3, 3, dtype=jnp.float32)
    x = jnp.moveaxis(X, -1, 1)
    assert_fused(lambda norm, x: jax.nn.relu(jax.vmap(norm)(x)), norm, x, bn_relu=1)


def _sum_of_squares(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
    return jnp.sum(join(x, z, scale, bias) ** 2)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_examples_on_several_devices(kind: MeshKind) -> None:
    """No device needs what another one has, but for the sums of the parameters' gradients."""
    mesh = make_mesh(kind, data=8)
    arrays = array((8, 5, 8, 3)), array((8, 5, 8, 3), 1)
    given = *(put(a, mesh, P("data")) for a in arrays), put(SCALE, mesh, P()), put(BIAS, mesh, P())
    with use_mesh(mesh):
        gradient = jax.jit(jax.grad(jax_bnar.fuse(_sum_of_squares), (0, 1, 2, 3)))
        sent, ours = collectives(gradient, *given), gradient(*given)
    assert {(c.opcode, c.shape) for together in sent for c in together} == {("all-reduce", (3,))}
    expected = jax.grad(_sum_of_squares, (0, 1, 2, 3))(*arrays, SCALE, BIAS)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_a_picture_on_several_devices() -> None:
    """Each device has some rows of every example, and the statistics are those of all rows."""
    mesh = make_mesh("auto", rows=4)

    def local(x: Any, scale: Any, bias: Any) -> jax.Array:
        mean = lax.pmean(x.mean((1, 2), keepdims=True), "rows")
        squares = lax.pmean((x * x).mean((1, 2), keepdims=True), "rows")
        y = (x - mean) * lax.rsqrt(squares - mean * mean + 1e-3)
        return jax.nn.relu(y * scale.reshape(VECTOR) + bias.reshape(VECTOR))

    spec = P(None, "rows")
    layer = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec)
    assert_fused(layer, array((2, 8, 16, 3)), SCALE, BIAS, bn_relu=1)


def test_symbolic_pictures() -> None:
    """The number of examples is one of groups, which the operators need to know."""
    sizes = export.symbolic_shape("n, h, w")
    vectors = (jax.ShapeDtypeStruct((3,), jnp.float32),) * 2
    x = jax.ShapeDtypeStruct((6, *sizes[1:], 3), jnp.float32)
    assert operators(relu_of, x, *vectors) == {"bn_relu": 1}
    x = jax.ShapeDtypeStruct((sizes[0], 5, 8, 3), jnp.float32)
    assert not operators(relu_of, x, *vectors)
    (candidate,) = jax_bnar.explain(relu_of)(x, *vectors).refused
    assert "symbolic" in candidate.reason


def test_examples_of_few_elements() -> None:
    x = X[:, :, :6]
    assert_untouched(relu_of, x, SCALE, BIAS, reason="fewer than 32 elements")


def test_layer_norms_without_parameters() -> None:
    """Those of a vmap over examples and positions look like channels that come first."""

    def layer(x: Any) -> Any:
        return jax.nn.relu(
            (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
        )

    assert_untouched(layer, array((2, 5, 64)), reason="LayerNorm")
    layers = jax.vmap(jax.vmap(eqx.nn.LayerNorm(64, use_weight=False, use_bias=False)))
    assert_untouched(layers, array((2, 5, 64)), reason="LayerNorm")


def test_a_channel_axis_between() -> None:
    """Groups of channels, as GroupNorm makes them, lie between pixels and channels."""

    def layer(x: Any) -> Any:
        return jax.nn.relu(instance_norm(x, None, None, 2))

    assert_untouched(layer, X, reason="GroupNorm")
