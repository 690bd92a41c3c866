"""More than 2^31 elements, so that 32-bit indices overflow.

What runs with so many needs 20 GB (`-m large`). All other tests trace.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bnar
from jax_bnar._base.element_count import element_count

CHANNELS = 64
ROWS = 2**25 + 3  # times 64 channels, this is 192 elements more than 2^31


@pytest.mark.large
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_more_than_int32_elements(layout: str) -> None:
    """Rows alternate between 0 and 2, so that mean, var, y and dx are known everywhere."""
    shape, axis = ((ROWS, CHANNELS), -1) if layout == "nhwc" else ((1, CHANNELS, ROWS), 1)
    row_axis = 0 if layout == "nhwc" else 2
    assert np.prod(shape) > 2**31

    @jax.jit
    def make() -> jax.Array:
        parity = jax.lax.broadcasted_iota(jnp.int32, shape, row_axis) % 2
        return (2 * parity).astype(jnp.bfloat16)

    x = make()
    result, vjp = jax.vjp(
        lambda x: jax_bnar.bn_relu(
            x, None, None, axis=axis, save="mask", epsilon=1.0, implementation="ffi"
        ),
        x,
    )
    # ROWS is odd, so there is one 0 more than there are 2s.
    twos = ROWS // 2
    mean = 2 * twos / ROWS
    var = mean * (2 - mean)
    np.testing.assert_allclose(result.mean, np.full(CHANNELS, mean), rtol=1e-6)
    np.testing.assert_allclose(result.var, np.full(CHANNELS, var), rtol=1e-6)
    positive = (2 - mean) / np.sqrt(var + 1)
    assert_alternates(result.y, row_axis, 0.0, positive)

    cotangents = jax.tree.map(jnp.ones_like, result)._replace(
        mean=jnp.zeros_like(result.mean), var=jnp.zeros_like(result.var)
    )
    del result
    (dx,) = vjp(cotangents)
    rstd = 1 / np.sqrt(var + 1)
    sum_e, sum_ec = twos, twos * (2 - mean)
    below, above = (
        rstd * (e - sum_e / ROWS - (v - mean) * rstd**2 * sum_ec / ROWS)
        for e, v in ((0.0, 0.0), (1.0, 2.0))
    )
    assert_alternates(dx, row_axis, below, above)


def assert_alternates(array: jax.Array, row_axis: int, even: float, odd: float) -> None:
    """Checks slices at both ends and in the middle, and the extremes over everything."""
    for start in (0, ROWS // 2 - 1, ROWS - 40):
        rows = np.arange(start, start + 40)
        part = jax.lax.slice_in_dim(array, start, start + 40, axis=row_axis)
        expected = np.where(rows % 2, odd, even)
        got = np.moveaxis(np.asarray(part).astype(np.float64), row_axis, -1)
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=2**-8, atol=1e-6)
    low, high = sorted((even, odd))
    np.testing.assert_allclose(float(array.min()), low, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(float(array.max()), high, rtol=2**-8, atol=1e-6)


MANY = jax.ShapeDtypeStruct((2**31, 1), jnp.bfloat16)
CHOICE = jax.ShapeDtypeStruct(MANY.shape, jnp.bool_)


def _relu(x: Any, implementation: Any = None) -> jax.Array:
    return jax_bnar.bn_relu(x, None, None, implementation=implementation).y


def _var(x: Any, where: Any = None) -> jax.Array:
    return jax_bnar.batch_statistics(x, where=where).var.sum()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (jax.grad(lambda x: _relu(x).astype(jnp.float32).sum()), (MANY,)),
        (jax.grad(lambda x: _relu(x, "xla").astype(jnp.float32).sum()), (MANY,)),
        (lambda x: jax.jvp(_relu, (x,), (x,)), (MANY,)),
        (jax.grad(_var), (MANY,)),
        (jax.grad(_var), (MANY, CHOICE)),
        (lambda x: jax.jvp(_var, (x,), (x,)), (MANY,)),
    ],
    ids=["gradient", "in pure JAX", "tangent", "of statistics", "of selected", "of their tangent"],
)
def test_as_many_elements_of_a_channel(function: Any, arguments: Any) -> None:
    """JAX's integers have 32 bits there."""
    with jax.enable_x64(False):
        jax.eval_shape(function, *arguments)


def test_counts_that_32_bits_do_not_hold() -> None:
    with jax.enable_x64(False):
        groups = jnp.asarray([1, 3])[1]  # as on a device that shares statistics with two others
        assert element_count(groups, 2**15, 2**15, dtype=jnp.float32) == 3.0 * 2**30
        assert element_count(2**40, 2**40, dtype=jnp.float32) == 2.0**80
