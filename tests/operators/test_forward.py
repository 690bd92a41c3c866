"""Forward is within one rounding of the oracle, and no less accurate than unfused code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    CORNER_SHAPES,
    RESNET_SHAPES,
    Case,
    Form,
    all_dtypes,
    both_implementations,
    cases,
    layouts,
    one_or_two_inputs,
    operands,
    operator,
    unfused,
)
from hypothesis import given, settings
from outcomes import chain_of_squares, check_results, expected_results

import jax_bnar
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick


def forward(case: Case, implementation: Implementation, *arrays: Any) -> list[Any]:
    """y, mean and var as NumPy arrays."""
    function = operator(case.form, implementation=implementation, **case.keywords)
    return list(jax.tree.map(np.asarray, tuple(function(*arrays))))


def check(case: Case, implementation: Implementation) -> None:
    given_operands = operands(case)
    y, mean, var = forward(case, implementation, *given_operands)
    exact = expected_results(case, given_operands)
    check_results(case, y, mean, var, exact, chain=chain_of_squares(implementation))


@both_implementations
@settings(max_examples=25)
@given(case=cases(may_widen=True))
def test_agrees_with_oracle(implementation: Implementation, case: Case) -> None:
    check(case, implementation)


@pytest.mark.parametrize(
    ("form", "implementation", "dtype"),
    [
        ("bn_add_relu", "ffi", "float32"),
        ("bn_add_relu", "ffi", "bfloat16"),
        ("bn_add_relu", "xla", "float32"),
        ("dual_bn_add_relu", "ffi", "bfloat16"),
        pytest.param("dual_bn_add_relu", "ffi", "float32", marks=pytest.mark.slow),
    ],
)
@layouts(CORNER_SHAPES | RESNET_SHAPES)
def test_shapes(
    form: Form, implementation: Implementation, dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    check(Case(shape, axis, dtype, form, save="mask"), implementation)


@both_implementations
@all_dtypes
@pytest.mark.parametrize(
    "keywords",
    [{}, {"axis": 1, "save": "mask", "epsilon": 1e-2}, {"num_groups": 3}],
    ids=["nhwc", "nchw-mask", "groups"],
)
def test_two_inputs_of_every_dtype(
    implementation: Implementation, dtype: str, keywords: dict[str, Any]
) -> None:
    check(Case((6, 5, 4, 7), dtype=dtype, form="dual_bn_add_relu", **keywords), implementation)


@both_implementations
@all_dtypes
@one_or_two_inputs
@pytest.mark.parametrize("shape", [(1, 24), (1, 5, 1, 1)])
def test_single_element_has_no_variance(
    implementation: Implementation, dtype: str, form: Form, shape: tuple[int, ...]
) -> None:
    case = Case(shape, 1, dtype, form, scale_dtype=None, bias_dtype=None)
    x, z, _, _ = operands(case)
    y, mean, var = forward(case, implementation, x, z, None, None)
    for own_x, own_mean, own_var in oracle.each_input(x, mean, var):
        np.testing.assert_array_equal(own_mean, own_x.ravel().astype(own_mean.dtype))
        np.testing.assert_array_equal(own_var, np.zeros_like(own_var))
    np.testing.assert_array_equal(y, np.zeros_like(y) if z is None else np.maximum(z, 0 * z))


@both_implementations
@all_dtypes
@one_or_two_inputs
@pytest.mark.parametrize("axis", [1, -1])
def test_constant_channels(
    implementation: Implementation, dtype: str, form: Form, axis: int
) -> None:
    case = Case((6, 37, 5, 37), axis, dtype, form)
    given_operands = operands(case)
    along_channels = [1, 37, 1, 1] if axis == 1 else [1, 1, 1, 37]
    # The values cannot be summed exactly: a running sum of 0.1 drifts from multiples of 0.1.
    values = (0.1 * np.arange(-18, 19)).reshape(along_channels)
    for i in range(case.inputs):
        constant = np.broadcast_to(values + i, case.shape).astype(jnp.dtype(dtype))
        given_operands = given_operands.with_x(i, constant)
    x, z, _, bias = given_operands
    y, mean, var = forward(case, implementation, *given_operands)
    wide: Any = np.zeros(case.shape, np.longdouble) if z is None else z.astype(np.longdouble)
    for own_x, own_bias, own_mean, own_var in oracle.each_input(x, bias, mean, var):
        constants = (own_x[0, :, 0, 0] if axis == 1 else own_x[0, 0, 0]).astype(own_mean.dtype)
        # A sum finished in float64 may be wrong in its last digits, which only float64 results
        # show.
        np.testing.assert_array_max_ulp(own_mean, constants, maxulp=2 if dtype == "float64" else 0)
        assert (own_var <= np.square(2.0**-50 * constants)).all()
        wide = wide + own_bias.reshape(along_channels)
    allowance = 4 * oracle.unit_roundoff(dtype) * np.abs(wide) + 1e-7
    oracle.assert_within("y", y, np.maximum(wide, 0), allowance)


@both_implementations
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((4099, 16), -1), ((16, 14, 14, 65), -1), ((8, 24, 14, 15), 1), ((200_000, 8), -1)],
)
def test_variance_survives_large_means(
    implementation: Implementation, ratio: float, shape: tuple[int, ...], axis: int
) -> None:
    case = Case(shape, axis, ratio=ratio, form="batch_norm", scale_dtype=None, bias_dtype=None)
    x = operands(case).x
    expected = expected_results(case, operands(case))
    y, mean, var = forward(case, implementation, x, None, None, None)
    np.testing.assert_allclose(var, expected.var, rtol=1e-5)
    np.testing.assert_allclose(mean, expected.mean, rtol=2e-7)
    # If the mean is off by one ulp, y changes by this much, whatever the algorithm.
    ulp_of_mean = np.max(np.abs(expected.mean) / np.sqrt(expected.var)) * 2.0**-23
    assert np.abs(y - expected.y).max() <= 2 * ulp_of_mean + 1e-4


def outlier_first(
    shape: tuple[int, int], dtype: str, mean: float, first: float, rows: int
) -> oracle.Array:
    x = mean + np.random.default_rng(0).standard_normal(shape)
    x[:rows] = first
    return x.astype(dtype)


@functools.cache
def variance(**keywords: Any) -> Any:
    """A function that returns the variance of x."""
    return jax.jit(lambda x: jax_bnar.batch_norm(x, None, None, **keywords).var)


@both_implementations
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    ("mean", "first", "rows"),
    [
        (1e6, 0.0, 1),  # padding, then data: shifting by the first element does not help
        (1e6, 0.0, 33),
        (0.0, 1e6, 1),
        (0.0, 1e3, 1),
        (1e4, 1e4 + 300.0, 1),
        (1e4, 0.0, 1),
    ],
)
@pytest.mark.parametrize("count", [1023, 200_000])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-13)])
def test_variance_survives_an_outlier_in_front(
    implementation: Implementation,
    layout: str,
    mean: float,
    first: float,
    rows: int,
    count: int,
    dtype: str,
    tolerance: float,
) -> None:
    x = outlier_first((count, 8), dtype, mean, first, rows)
    exact = x.astype(oracle.wide_dtype(dtype)).var(axis=0)
    x = x if layout == "nhwc" else x.T[None]
    axis = -1 if layout == "nhwc" else 1
    var = variance(axis=axis, implementation=implementation)(x)
    np.testing.assert_allclose(var, exact, rtol=tolerance)


@both_implementations
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@layouts(RESNET_SHAPES)
def test_no_worse_than_unfused(
    implementation: Implementation, dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    case = Case(shape, axis, dtype)
    given_operands = operands(case)
    exact = oracle.forward(*given_operands, epsilon=case.epsilon, axis=axis).y
    ours = forward(case, implementation, *given_operands)[0]
    theirs = np.asarray(jax.jit(unfused, static_argnames="axis")(*given_operands, axis=axis).y)

    def worst_and_mean(y: oracle.Array) -> tuple[float, float]:
        error = np.abs(y.astype(np.float64) - exact)
        return float(error.max()), float(error.mean())

    # In float32 both are off by a few units in the last place, and which is better is chance.
    slack = 2.0 if dtype == "float32" else 1.0
    for name, our, their in zip(
        ("worst", "mean"), worst_and_mean(ours), worst_and_mean(theirs), strict=True
    ):
        assert our <= slack * their, f"{name} error: ours {our:.3e}, unfused {their:.3e}"
