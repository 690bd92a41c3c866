"""Inf, NaN, -0.0, the kink of the ReLU, and operands that alias or repeat."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    Case,
    Form,
    Operands,
    all_dtypes,
    both_implementations,
    call,
    cotangents,
    one_or_two_inputs,
    operands,
    operator,
    outcome,
    run,
)
from outcomes import assert_same

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

layouts = pytest.mark.parametrize("axis", [1, -1])
# An operator, and the number of the input that has a special value.
inputs = pytest.mark.parametrize(
    ("form", "number"), [("bn_add_relu", 0), ("dual_bn_add_relu", 0), ("dual_bn_add_relu", 1)]
)
SHAPE = (6, 19, 5, 19)


def columns(array: Any, axis: int, num_groups: int = 1) -> oracle.Array:
    """(G, elements, C): one column for each statistic."""
    array = np.moveaxis(np.asarray(array), axis, -1)
    return array.reshape(num_groups, -1, array.shape[-1])


def x_of(given: Operands, number: int) -> Any:
    """A copy of the x of this input."""
    return (given.x[number] if isinstance(given.x, tuple) else given.x).copy()


def statistics_of(results: Any, number: int) -> tuple[Any, Any]:
    _, mean, var = jax.tree.map(np.asarray, tuple(results))
    return (mean[number], var[number]) if isinstance(mean, tuple) else (mean, var)


def assert_others_untouched(before: Any, after: Any, number: int) -> None:
    """The statistics of the inputs other than the one of this number are the same."""
    for i in range(len(before.mean) if isinstance(before.mean, tuple) else 1):
        if i != number:
            for left, right in zip(statistics_of(before, i), statistics_of(after, i), strict=True):
                np.testing.assert_array_equal(left, right)


@both_implementations
@all_dtypes
@layouts
@inputs
@pytest.mark.parametrize("position", [0, -1])
def test_nan_stays_in_its_channel_and_group(
    implementation: Implementation, dtype: str, axis: int, form: Form, number: int, position: int
) -> None:
    case = Case(SHAPE, axis, dtype, form, num_groups=2)
    clean = operands(case)
    function = operator(case.form, implementation=implementation, **case.keywords)
    before = function(*clean)
    x = x_of(clean, number)
    # In group 1, channel 4. A kernel may shift by the first element of a group.
    np.moveaxis(x, axis, -1)[3 if position >= 0 else -1, position, 0, 4] = np.nan
    after = function(*clean.with_x(number, x))
    touched = np.zeros((2, 19), bool)
    touched[1, 4] = True
    for clean_statistic, statistic in zip(
        statistics_of(before, number), statistics_of(after, number), strict=True
    ):
        assert np.isnan(statistic[touched]).all()
        np.testing.assert_array_equal(statistic[~touched], clean_statistic[~touched])
    assert_others_untouched(before, after, number)
    left, right = columns(before.y, axis, 2), columns(after.y, axis, 2)
    everywhere = np.broadcast_to(touched[:, None], left.shape)
    assert np.isnan(right[everywhere]).all()
    np.testing.assert_array_equal(right[~everywhere], left[~everywhere])


@both_implementations
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@layouts
@inputs
@pytest.mark.parametrize("position", [0, 7])
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_infinite_x(
    implementation: Implementation,
    dtype: str,
    axis: int,
    form: Form,
    number: int,
    position: int,
    infinity: float,
) -> None:
    """The mean is infinite and the variance NaN, as with `jnp.mean` and `jnp.var`."""
    case = Case(SHAPE, axis, dtype, form)
    clean = operands(case)
    function = operator(case.form, implementation=implementation, **case.keywords)
    x = x_of(clean, number)
    np.moveaxis(x, axis, -1)[position // 5, position % 5, 0, 4] = infinity
    before, after = function(*clean), function(*clean.with_x(number, x))
    others = np.arange(19) != 4
    mean, var = statistics_of(after, number)
    assert mean[4] == infinity
    assert np.isnan(var[4])
    assert np.isnan(columns(after.y, axis)[..., 4]).all()
    for left, right in zip((mean, var), statistics_of(before, number), strict=True):
        np.testing.assert_array_equal(left[others], right[others])
    assert_others_untouched(before, after, number)
    np.testing.assert_array_equal(
        columns(after.y, axis)[..., others], columns(before.y, axis)[..., others]
    )


@both_implementations
@layouts
def test_special_values_of_z_touch_one_element(implementation: Implementation, axis: int) -> None:
    case = Case(SHAPE, axis)
    given, dout = operands(case), cotangents(case)
    z = given.z.copy()
    z[0, 0, 0, 0], z[1, 2, 3, 4], z[5, 18, 4, 18] = np.nan, np.inf, -np.inf
    before = run(case, implementation, given, dout)
    after = run(case, implementation, given._replace(z=z), dout)
    assert np.isnan(after.y[0, 0, 0, 0])
    assert after.y[1, 2, 3, 4] == np.inf
    assert after.y[5, 18, 4, 18] == 0
    # NaN is not > 0, so its gate is closed, and the NaN does not reach any gradient.
    assert after.dz[0, 0, 0, 0] == 0
    assert after.dz[1, 2, 3, 4] == dout.y[1, 2, 3, 4]
    assert all(np.isfinite(gradient).all() for gradient in after[3:] if gradient is not None)
    untouched = np.isfinite(z)
    np.testing.assert_array_equal(after.y[untouched], before.y[untouched])


@both_implementations
@all_dtypes
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_gradient_is_zero_at_zero(
    implementation: Implementation, dtype: str, save: Save, zero: float
) -> None:
    """A constant channel has x-mean = 0, so the pre-activation is exactly z."""
    case = Case((4, 5, 17), dtype=dtype, save=save, scale_dtype=None, bias_dtype=None)
    x = np.full_like(operands(case).x, 3.0)
    z = np.full_like(x, zero)
    actual = run(case, implementation, Operands(x, z, None, None), cotangents(case))
    np.testing.assert_array_equal(actual.y, np.zeros_like(z))
    np.testing.assert_array_equal(actual.dz, np.zeros_like(z))


@both_implementations
@all_dtypes
@pytest.mark.parametrize("save", ["y", "mask"])
def test_gradient_is_zero_where_two_inputs_cancel(
    implementation: Implementation, dtype: str, save: Save
) -> None:
    """With two constant channels, the pre-activation is the sum of the biases: exactly 0."""
    case = Case((4, 5, 17), dtype=dtype, form="dual_bn_add_relu", save=save)
    given, dout = operands(case), cotangents(case)
    bias = given.bias[0]
    given = given._replace(
        x=tuple(np.full_like(x, i + 3.0) for i, x in enumerate(given.x)), bias=(bias, -bias)
    )
    actual = run(case, implementation, given, dout._replace(mean=_zeros(dout), var=_zeros(dout)))
    np.testing.assert_array_equal(actual.y, np.zeros_like(actual.y))
    for gradient in jax.tree.leaves((actual.dx, actual.dscale, actual.dbias)):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def _zeros(dout: Any) -> tuple[Any, ...]:
    return tuple(np.zeros_like(mean) for mean in dout.mean)


@both_implementations
@all_dtypes
@one_or_two_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
@layouts
def test_closed_gate_stops_every_cotangent(
    implementation: Implementation, dtype: str, form: Form, save: Save, axis: int
) -> None:
    """Even NaN and Inf cotangents are stopped; a gate that multiplies by 0 would pass them."""
    case = Case(SHAPE, axis, dtype, form, save=save)
    given, dout = operands(case), cotangents(case)
    y = run(case, implementation, given, dout).y
    closed = y <= 0
    assert closed.any()
    dy = np.where(closed, np.asarray(np.nan, y.dtype), dout.y)
    dy.ravel()[np.flatnonzero(closed)[::2]] = np.inf
    actual = run(case, implementation, given, dout._replace(y=dy))
    assert_same(actual, run(case, implementation, given, dout))


@both_implementations
@one_or_two_inputs
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("epsilon", [1e-300, 5e-324])
def test_tiny_epsilon(
    implementation: Implementation, epsilon: float, form: Form, dtype: str
) -> None:
    """It rounds to 0 in float32, and 0/0 would turn a constant channel into NaN.

    The second one counts as 0 where XLA runs the kernels.
    """
    case = Case((8, 16), dtype=dtype, form=form, epsilon=epsilon)
    given, dout = operands(case), cotangents(case)
    x = jax.tree.map(lambda x: np.full_like(x, 0.1), given.x)
    actual = run(case, implementation, given._replace(x=x), dout)
    assert np.isfinite(actual.y).all()
    # A second bias takes the place of z.
    biases = given.bias if given.z is None else (given.z.astype(np.float64), given.bias)
    wide = np.broadcast_to(biases[0] + np.float64(biases[1]), case.shape)
    allowance = 4 * oracle.unit_roundoff(dtype) * np.abs(wide) + 1e-7
    oracle.assert_within("y", actual.y, np.maximum(wide, 0), allowance)


@both_implementations
def test_large_values_do_not_overflow(implementation: Implementation) -> None:
    """The squares of large float16 values overflow float16, but the arithmetic is float32."""
    case = Case((64, 8), dtype="float16", scale_dtype=None, bias_dtype=None, form="batch_norm")
    x = np.where(np.arange(512).reshape(64, 8) % 16 < 8, 65504, -65504).astype(np.float16)
    y, mean, var = operator(case.form, implementation=implementation)(x, None, None, None)
    np.testing.assert_array_equal(mean, np.zeros(8))
    np.testing.assert_allclose(var, np.full(8, 65504.0**2), rtol=1e-6)
    np.testing.assert_array_equal(y, np.sign(x))


@both_implementations
@one_or_two_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
def test_one_array_as_two_operands(implementation: Implementation, form: Form, save: Save) -> None:
    """z is x, or x2 is x1: gradients add up and nothing is overwritten."""
    case = Case((5, 7, 33), form=form, save=save)
    given, dout = operands(case), cotangents(case)
    keywords = {"implementation": implementation, **case.keywords}

    def shared(x: Any) -> Operands:
        if form == "bn_add_relu":
            return given._replace(x=x, z=x)
        return given._replace(x=(x, x))

    @jax.jit
    def together(x: Any) -> Any:
        results, vjp = jax.vjp(lambda x: tuple(call(form, *shared(x), **keywords)), x)
        return results[0], vjp(tuple(dout))[0]

    x = x_of(given, 0)
    apart = run(case, implementation, shared(x), dout)
    y, dx = together(x)
    np.testing.assert_array_equal(y, apart.y)
    total = apart.dx + apart.dz if form == "bn_add_relu" else apart.dx[0] + apart.dx[1]
    np.testing.assert_allclose(dx, total, rtol=1e-5, atol=1e-6)


@both_implementations
def test_numpy_operands_of_any_strides(implementation: Implementation) -> None:
    """Eager calls on arrays that are reversed, transposed or slices of larger arrays."""
    case = Case((6, 8, 10))
    given = operands(case)
    x, z, scale, bias = given
    function = functools.partial(jax_bnar.bn_add_relu, implementation=implementation)
    expected = function(*(jnp.asarray(array) for array in given))
    strided_x: Any = np.ascontiguousarray(x.T).T
    padded: Any = np.zeros((6, 16, 10), z.dtype)
    padded[:, ::2] = z
    reversed_scale: Any = np.ascontiguousarray(scale[::-1])[::-1]
    assert not strided_x.flags.c_contiguous
    actual = function(strided_x, padded[:, ::2], reversed_scale, bias)
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("form", "implementation"),
    [("bn_add_relu", "ffi"), ("bn_add_relu", "xla"), ("dual_bn_add_relu", "ffi")],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "axis"), [((16, 28, 28, 65), -1), ((8, 65, 28, 28), 1)])
def test_two_runs_are_bitwise_equal(
    form: Form, implementation: Implementation, dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    """The arrays are large enough for several threads to share the work."""
    case = Case(shape, axis, dtype, form, save="mask", ratio=10)
    given, dout = operands(case), cotangents(case)
    function = operator(case.form, implementation=implementation, **case.keywords)
    first = outcome(function, given, dout)
    for _ in range(3):
        assert_same(first, outcome(function, given, dout))
