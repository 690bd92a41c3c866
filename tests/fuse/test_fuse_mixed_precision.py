"""Programs that normalise in float32 for an x of 16 bits, and then round what follows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from fuse_operands import AXES, BIAS, SCALE, X, Z, batch_norm, programs_of
from fuse_tools import array, assert_fused
from programs import equations

import jax_bnar

WIDE = jnp.float32
both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def dtypes_of_calls(function: Callable[..., Any], *args: Any) -> list[set[str]]:
    """The dtypes of the large arrays of each of our calls in a fused function."""
    return [
        {v.aval.dtype.name for v in (*each.invars, *each.outvars) if v.aval.ndim > 2}
        for each in equations(jax.make_jaxpr(jax_bnar.fuse(function))(*args))
        if each.primitive.name == "bnar_forward"
    ]


@both_dtypes
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, jax.nn.leaky_relu])
def test_a_rounded_result_is_that_of_the_kernel(activation: Any, dtype: str) -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        return activation(batch_norm(x.astype(scale.dtype), scale, bias)).astype(x.dtype)

    operands = X.astype(dtype), SCALE, BIAS
    name = "bn_relu" if activation is jax.nn.relu else "bn_act"
    assert_fused(layer, *operands, **{name: 1})
    assert dtypes_of_calls(layer, *operands) == [{dtype}]


@both_dtypes
def test_a_residual_that_was_widened_is_read_as_it_is(dtype: str) -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        wide = scale.dtype
        return jax.nn.relu(batch_norm(x.astype(wide), scale, bias) + z.astype(wide)).astype(x.dtype)

    operands = X.astype(dtype), Z.astype(dtype), SCALE, BIAS
    assert_fused(layer, *operands, bn_add_relu=1)
    assert dtypes_of_calls(layer, *operands) == [{dtype}]


@both_dtypes
def test_with_a_wide_residual_the_kernel_keeps_the_wide_result(dtype: str) -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x.astype(z.dtype), scale, bias) + z).astype(x.dtype)

    operands = X.astype(dtype), Z, SCALE, BIAS
    assert_fused(layer, *operands, bn_add_relu=1)
    assert dtypes_of_calls(layer, *operands) == [{dtype, Z.dtype.name}]


def test_residuals_are_not_added_in_16_bits() -> None:
    """In bfloat16, 256 + 1 is 256."""

    def layer(x: Any, first: Any, second: Any, third: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x.astype(scale.dtype), scale, bias)
        for z in (first, second, third):
            y = y + z.astype(y.dtype)
        return jax.nn.relu(y).astype(x.dtype)

    x = X.astype(jnp.bfloat16)
    residuals = (jnp.full_like(x, 256), jnp.ones_like(x), jnp.full_like(x, -256))
    assert_fused(layer, x, *residuals, SCALE, BIAS, bn_add_relu=1)
    expected = layer(x, *residuals, SCALE, BIAS)
    np.testing.assert_allclose(
        *(
            jnp.asarray(y, WIDE)
            for y in (jax_bnar.fuse(layer)(x, *residuals, SCALE, BIAS), expected)
        ),
        rtol=0.02,
        atol=0.02,
    )


@pytest.mark.parametrize(("dtype", "large"), [("float16", 4e4), ("bfloat16", 256.0)])
def test_residuals_are_not_added_to_each_other(dtype: str, large: float) -> None:
    """In float16 their sum would be infinite, and in bfloat16 256 + 1 is 256."""

    def layer(x: Any, first: Any, second: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias) + first + second)

    x, scale, bias = (a.astype(dtype) for a in (X, 0 * SCALE, 0 * BIAS - large))
    second = jnp.ones_like(x) if dtype == "bfloat16" else jnp.full_like(x, large)
    operands = x, jnp.full_like(x, large), second, scale, bias
    fused, expected = jax_bnar.fuse(layer)(*operands), layer(*operands)
    np.testing.assert_array_equal(jnp.asarray(fused, WIDE), jnp.asarray(expected, WIDE))


@both_dtypes
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.leaky_relu, jax.nn.relu6])
def test_dx_is_not_formed_from_a_rounded_dz(activation: Any, dtype: str) -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        wide = scale.dtype
        return activation(batch_norm(x.astype(wide), scale, bias) + z.astype(wide)).astype(x.dtype)

    operands = X[:2, :1, :1].astype(dtype), Z[:2, :1, :1].astype(dtype), SCALE, BIAS
    assert_fused(layer, *operands, bn_act=1)
    assert dtypes_of_calls(layer, *operands) == [{SCALE.dtype.name}]


def test_the_derivative_of_relu6_is_that_before_rounding() -> None:
    """In bfloat16, 5.99 is 6."""

    def layer(x: Any, z: Any) -> Any:
        y = batch_norm(x.astype(z.dtype), 0 * SCALE, 0 * BIAS) + z
        return jax.nn.relu6(y).astype(x.dtype).astype(z.dtype).sum()

    z = jnp.full_like(Z, 5.99)
    dz = jax.grad(jax_bnar.fuse(layer), 1)(X.astype(jnp.bfloat16), z)
    np.testing.assert_array_equal(dz, jnp.ones_like(z))

    def narrow(x: Any, z: Any) -> Any:
        return layer(x, z.astype(WIDE))

    dz = jax.grad(jax_bnar.fuse(narrow), 1)(X.astype(jnp.bfloat16), z.astype(jnp.bfloat16))
    np.testing.assert_array_equal(
        dz, jax.grad(narrow, 1)(X.astype(jnp.bfloat16), z.astype(dz.dtype))
    )


@pytest.mark.parametrize("other", ["returned", "float16", "twice"])
def test_a_wide_result_that_is_used_is_kept(other: str) -> None:
    """Also one that is rounded to another dtype than that of x, or read in two places."""

    def layer(x: Any, scale: Any, bias: Any) -> Any:
        y = jax.nn.relu(batch_norm(x.astype(scale.dtype), scale, bias))
        if other == "returned":
            return y.astype(x.dtype), y
        if other == "float16":
            return y.astype(jnp.float16)
        return y.astype(x.dtype), jnp.sin(y)

    operands = X.astype(jnp.bfloat16), SCALE, BIAS
    assert_fused(layer, *operands, bn_relu=1)
    assert dtypes_of_calls(layer, *operands) == [{"bfloat16", SCALE.dtype.name}]


class Block(nn.Module):
    """Convolutions in bfloat16 and norms in float32, as models for TPUs are often written."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def norm(a: Any) -> Any:
            return nn.BatchNorm(use_running_average=False, dtype=WIDE)(a)

        y = nn.relu(norm(nn.Conv(4, (1, 1), dtype=jnp.bfloat16)(x)))
        y = nn.relu(norm(nn.Conv(4, (3, 3), dtype=jnp.bfloat16)(y)))
        return norm(nn.Conv(3, (1, 1), dtype=jnp.bfloat16)(y))


@jax.numpy_dtype_promotion("standard")  # Flax promotes implicitly.
def test_a_flax_block_with_norms_in_float32() -> None:
    x = X.astype(jnp.bfloat16)
    block = Block()
    variables = block.init(jax.random.key(0), x)

    def apply(params: Any, x: Any) -> Any:
        stats = variables["batch_stats"]
        return block.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])

    calls = dtypes_of_calls(apply, variables["params"], x)
    assert calls == [{"bfloat16"}, {"bfloat16"}, {"bfloat16", "float32"}]
    report = jax_bnar.explain(apply)(variables["params"], x)
    assert [(each.module, each.operator) for each in report.matched] == [
        ("Block/BatchNorm_0", "bn_relu"),
        ("Block/BatchNorm_1", "bn_relu"),
        ("Block/BatchNorm_2", "batch_norm"),
    ]
    y, expected = jax_bnar.fuse(apply)(variables["params"], x)[0], apply(variables["params"], x)[0]
    np.testing.assert_allclose(y, expected, atol=0.05)


@both_dtypes
@pytest.mark.parametrize("is_rounded_first", [False, True])
def test_the_wide_copy_is_split_into_groups(dtype: str, is_rounded_first: bool) -> None:
    """Ghost batches of convolutions in 16 bits, as init2winit's VirtualBatchNorm makes them."""

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        groups = x.astype(scale.dtype).reshape(2, 3, *x.shape[1:])
        mean, var = (f(groups, (1, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        scale, bias = scale.reshape(1, 1, 1, 1, -1), bias.reshape(1, 1, 1, 1, -1)
        y = (groups - mean) * jax.lax.rsqrt(var + 1e-3) * scale + bias
        if is_rounded_first:
            return y.astype(x.dtype).reshape(x.shape)
        return y.reshape(x.shape).astype(x.dtype)

    programs = programs_of(norm)
    x, z = X.astype(dtype), Z.astype(dtype)
    assert_fused(programs.relu_of, x, SCALE, BIAS, bn_relu=1)
    assert dtypes_of_calls(programs.relu_of, x, SCALE, BIAS) == [{dtype}]
    assert_fused(programs.join, x, z, SCALE, BIAS, bn_add_relu=1)
    assert_fused(programs.dual_join, x, z, SCALE, BIAS, dual_bn_add_relu=1)


@both_dtypes
def test_statistics_alone_of_a_wide_copy_that_is_split(dtype: str) -> None:
    def layer(x: Any, gate: Any) -> Any:
        groups = x.astype(gate.dtype).reshape(2, 4, *x.shape[1:])
        mean, var = (f(groups, (1, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        y = (groups - mean) * gate.reshape(groups.shape) * jax.lax.rsqrt(var + 1e-3)
        return y.reshape(x.shape).astype(x.dtype)

    operands = array((8, 16, 16, 3)).astype(dtype), array((8, 16, 16, 3), 1)
    assert_fused(layer, *operands, batch_statistics=1)
    (candidate,) = jax_bnar.explain(layer)(*operands).matched
    assert candidate.dtype == dtype


@pytest.mark.parametrize("has_z", [False, True])
def test_a_rounded_result_is_reported_once(has_z: bool) -> None:
    """What is done in float32 to an array that was normalised in 16 bits is no form of its own."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean, var = wide.mean(AXES), wide.var(AXES)
        y = (x - mean.astype(x.dtype)) * jax.lax.rsqrt(var + 1e-3).astype(x.dtype)
        y = y.astype(jnp.float32) * scale + bias
        return jax.nn.relu(y + z.astype(y.dtype) if has_z else y).astype(x.dtype)

    x, z = X.astype(jnp.bfloat16), Z.astype(jnp.bfloat16)
    with jax.numpy_rank_promotion("allow"):
        report = jax_bnar.explain(layer)(x, z, *(a.astype(jnp.float32) for a in (SCALE, BIAS)))
    (match,) = report.matched
    assert match.operator == ("bn_add_relu" if has_z else "bn_relu")
