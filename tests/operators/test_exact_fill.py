"""Mean and variance of exact data with tolerance 0: no digit may depend on how sums are split.

Pure JAX has a tolerance, because XLA replaces division by a constant n with multiplication by 1/n,
which misses the exact quotient by a unit or two in the last place. The kernels have none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Form, both_implementations, call
from exact_fill import arrange, exact_fill

import jax_bnar
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

# (axes before the channels, channels, axes after them): odd, even, small and large counts.
SHAPES = [
    ((1,), 17, ()),
    ((2,), 3, ()),
    ((37,), 65, ()),
    ((4099,), 9, ()),
    ((16, 56, 56), 8, ()),
    ((100_003,), 16, ()),
    ((3,), 65, (5, 7)),
    ((5,), 24, (7, 7)),
    ((16,), 8, (56, 56)),
    ((1,), 5, (100_003,)),
]


XLA_ULP = 4


@functools.cache
def statistics(form: Form = "batch_norm", **keywords: Any) -> Any:
    """A function that returns the mean and variance of x."""

    def of(x: Any) -> Any:
        result = call(form, x, None, None, None, **keywords)
        return result.mean, result.var

    return jax.jit(of)


def assert_exact(implementation: Implementation, got: Any, expected: oracle.Array) -> None:
    if implementation == "ffi":
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_array_max_ulp(np.asarray(got), expected, maxulp=XLA_ULP)


@both_implementations
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("before", "channels", "after"), SHAPES)
def test_statistics_are_exact(
    implementation: Implementation,
    dtype: str,
    before: tuple[int, ...],
    channels: int,
    after: tuple[int, ...],
) -> None:
    fill = exact_fill(int(np.prod(before + after)), channels, dtype)
    x, axis = arrange(fill.x, before, after)
    mean, var = statistics(axis=axis, implementation=implementation)(x)
    assert_exact(implementation, mean, fill.mean)
    assert_exact(implementation, var, fill.var)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("before", "channels", "after"), [SHAPES[i] for i in (2, 3, 7)])
def test_statistics_of_two_inputs_are_exact(
    dtype: str, before: tuple[int, ...], channels: int, after: tuple[int, ...]
) -> None:
    count = int(np.prod(before + after))
    fills = [exact_fill(count, channels, dtype, seed) for seed in (1, 2)]
    (x1, axis), (x2, _) = (arrange(fill.x, before, after) for fill in fills)
    function = statistics("dual_bn_add_relu", axis=axis, implementation="ffi")
    means, variances = function((x1, x2))
    for fill, mean, var in zip(fills, means, variances, strict=True):
        np.testing.assert_array_equal(mean, fill.mean)
        np.testing.assert_array_equal(var, fill.var)


@both_implementations
@pytest.mark.parametrize(("before", "channels", "after"), SHAPES)
def test_statistics_of_float64(
    implementation: Implementation, before: tuple[int, ...], channels: int, after: tuple[int, ...]
) -> None:
    """There is no wider dtype than float64, so the last division may cost a unit or two."""
    fill = exact_fill(int(np.prod(before + after)), channels, "float64")
    x, axis = arrange(fill.x, before, after)
    mean, var = statistics(axis=axis, implementation=implementation)(x)
    assert_exact(implementation, mean, fill.mean)
    maxulp = 2 if implementation == "ffi" else XLA_ULP
    np.testing.assert_array_max_ulp(np.asarray(var), fill.var, maxulp=maxulp)


@both_implementations
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_statistics_of_groups_are_exact(
    implementation: Implementation, dtype: str, axis: int
) -> None:
    groups = [exact_fill(3 * 49, 33, dtype, seed) for seed in range(4)]
    x: Any = np.stack([fill.x for fill in groups]).reshape(12, 7, 7, 33)
    x = jnp.asarray(np.moveaxis(x, -1, axis))
    mean, var = statistics(axis=axis, num_groups=4, implementation=implementation)(x)
    assert_exact(implementation, mean, np.stack([fill.mean for fill in groups]))
    assert_exact(implementation, var, np.stack([fill.var for fill in groups]))


@both_implementations
@pytest.mark.parametrize("axis", [-1, 1])
def test_benchdnn_forward_threshold(implementation: Implementation, axis: int) -> None:
    """With oneDNN's kind of scale, shift and epsilon, y is within oneDNN's float32 bound, 6e-7."""
    channels = 40
    fill = exact_fill(8 * 14 * 14, channels, "float32")
    x, axis = arrange(fill.x, (8,) if axis == 1 else (8, 14, 14), (14, 14) if axis == 1 else ())
    power = 2.0 ** (np.arange(channels) % 7)
    scale = (power / 8).astype(np.float32)
    bias = ((np.arange(channels) % 3 - 1) * power / 512).astype(np.float32)
    # z has the sign of x - mean, so that nothing cancels.
    z = np.sign(np.moveaxis(x, axis, -1) - fill.mean).astype(np.float32)
    z = np.moveaxis(z, -1, axis)
    exact = oracle.forward(x, z, scale, bias, epsilon=1 / 16, axis=axis, relu=True).y
    y = jax_bnar.bn_add_relu(
        *map(jnp.asarray, (x, z, scale, bias)),
        epsilon=1 / 16,
        axis=axis,
        implementation=implementation,
    ).y
    error = np.abs(np.asarray(y) - exact)
    relative = np.where(np.abs(exact) > 1e-5, error / np.maximum(np.abs(exact), 1e-5), error)
    assert relative.max() <= 6e-7
