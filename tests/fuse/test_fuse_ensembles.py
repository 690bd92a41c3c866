"""Ensembles: a `vmap` over parameters, inside of what is fused, gives each member its own norm."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_operands import batch_norm, programs_of
from fuse_tools import array, assert_fused, assert_no_worse, assert_untouched, kernels, operators
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_bnar

MEMBERS = 2
X = array((MEMBERS, 6, 5, 4, 3))
Z = array((MEMBERS, 6, 5, 4, 3), 1)
SCALE = array((MEMBERS, 3), 2)
BIAS = array((MEMBERS, 3), 3)
SHARED = array((3,), 4)


relu_of, join, dual_join = programs_of(batch_norm)


def silu_of(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.silu(batch_norm(x, scale, bias) + z)


@pytest.mark.parametrize(
    ("member", "operator"),
    [(join, "bn_add_relu"), (dual_join, "dual_bn_add_relu"), (silu_of, "bn_act")],
)
def test_members(member: Callable[..., Any], operator: str) -> None:
    assert_fused(jax.vmap(member), X, Z, SCALE, BIAS, **{operator: 1})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype: str) -> None:
    arrays = (a.astype(dtype) for a in (X, Z, SCALE, BIAS))
    assert_fused(jax.vmap(join), *arrays, bn_add_relu=1)


def test_members_of_one_channel() -> None:
    """As in a head that ends in a convolution to one channel."""
    assert_fused(jax.vmap(join), *(a[..., :1] for a in (X, Z, SCALE, BIAS)), bn_add_relu=1)


def test_a_parameter_that_members_share() -> None:
    """One of the two is enough to tell members from examples."""
    for in_axes, scale, bias in ((((0, 0, None)), SCALE, SHARED), (((0, None, 0)), SHARED, BIAS)):
        assert_fused(jax.vmap(relu_of, in_axes), X, scale, bias, bn_relu=1)


def test_members_that_share_both_parameters() -> None:
    """The arithmetic is that of an InstanceNorm; members of members are one too many for it."""
    program = jax.vmap(relu_of, (0, None, None))
    assert_fused(program, X, SHARED, SHARED, bn_relu=1)
    twice = jax.vmap(program, (0, None, None))
    assert_untouched(twice, X[None] * array((2, 1, 1, 1, 1, 1)), SHARED, SHARED, reason="example")


def test_members_of_members() -> None:
    program = jax.vmap(jax.vmap(join, (0, 0, 0, None)), (0, 0, None, 0))
    x, z = (jnp.stack([a, a[::-1] + 1, 2 * a]) for a in (X, Z))
    assert_fused(program, x, z, SCALE, array((3, 3), 5), bn_add_relu=1)


def test_parameters_in_another_order() -> None:
    program = jax.vmap(relu_of, (0, 1, 1))
    assert_fused(program, X, SCALE.T, BIAS.T, bn_relu=1)


def test_members_along_another_axis_of_the_operands() -> None:
    """The array that is normalised has the members first, because `vmap` moves them there."""
    program = jax.vmap(relu_of, (1, 0, 0), 1)
    assert_fused(program, jnp.moveaxis(X, 0, 1), SCALE, BIAS, bn_relu=1)


def test_channels_that_come_first() -> None:
    def member(x: Any, scale: Any, bias: Any) -> Any:
        mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
        y = (x - mean) * lax.rsqrt(var + 1e-3)
        return jax.nn.relu(y * scale.reshape(1, 3, 1) + bias.reshape(1, 3, 1))

    assert_fused(jax.vmap(member), array((MEMBERS, 6, 3, 5)), SCALE, BIAS, bn_relu=1)


def test_a_bias_before_the_norm() -> None:
    """As that of a convolution; it comes back in the running mean."""

    def member(x: Any, shift: Any, scale: Any, running: Any) -> Any:
        x = x + shift.reshape(1, 1, 1, 3)
        mean = x.mean((0, 1, 2))
        y = jax.nn.relu(batch_norm(x, scale, jnp.zeros(3, x.dtype)))
        return y, 0.9 * running + 0.1 * mean

    assert_fused(jax.vmap(member), X, BIAS, SCALE, BIAS, bn_relu=1)
    report = jax_bnar.explain(jax.vmap(member))(X, BIAS, SCALE, BIAS)
    assert not report.refused


def test_statistics_over_devices() -> None:
    """Each member's batch is divided over devices."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))

    def member(x: Any, scale: Any, bias: Any) -> Any:
        axes = (0, 1, 2)
        mean = lax.pmean(x.mean(axes), "data")
        var = lax.pmean((x * x).mean(axes), "data") - mean * mean
        mean, var, scale, bias = (v.reshape(1, 1, 1, -1) for v in (mean, var, scale, bias))
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * scale + bias)

    batch = P(None, "data")
    program = jax.shard_map(
        jax.vmap(member), mesh=mesh, in_specs=(batch, P(), P()), out_specs=batch
    )
    assert_fused(program, X, SCALE, BIAS, bn_relu=1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_device_has_members_of_its_own(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("member",), (axis_type,))
    program = jax_bnar.fuse(jax.vmap(join))
    expected = jax.jit(jax.vmap(join))(X, Z, SCALE, BIAS)
    with jax.set_mesh(mesh):
        arrays = jax.device_put((X, Z, SCALE, BIAS), jax.NamedSharding(mesh, P("member")))
        compiled = jax.jit(program).lower(*arrays).compile()
        y = compiled(*arrays)
        assert y.sharding.spec[0] == "member"
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    text = compiled.as_text()
    assert text is not None
    assert "all-" not in text


class Member(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features in (8, 4):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return x.mean((1, 2))


def test_linen() -> None:
    ensemble = nn.vmap(
        Member,
        in_axes=None,  # pyright: ignore[reportArgumentType] (Flax's annotation is too narrow)
        axis_size=MEMBERS,
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
    )()
    images = X[0]
    variables = ensemble.init(jax.random.key(0), images)

    def step(variables: Any, images: Any) -> Any:
        return ensemble.apply(variables, images, mutable=["batch_stats"])

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert operators(step, variables, images) == {"bn_relu": 2}
        assert kernels(jax_bnar.fuse(step), variables, images) == 2
        assert_no_worse(step, variables, images)


def test_nnx() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(5, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.relu(self.norm(self.dense(x)))

    @nnx.split_rngs(splits=MEMBERS)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(rngs)

    def apply(layer: Layer, x: Any) -> Any:
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layer, x)

    x = array((32, 5))
    plain, fused = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    assert operators(apply, plain, x) == {"bn_relu": 1}
    y = jax_bnar.fuse(apply)(fused, x)
    np.testing.assert_allclose(y, apply(plain, x), rtol=1e-5, atol=1e-5)
    for given, expected in zip(
        *(jax.tree.leaves(nnx.state(each, nnx.BatchStat)) for each in (fused, plain)), strict=True
    ):
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)
