"""Statistics and gradients are within their error bounds on data for which sums lose digits.

The oracle uses long double (80 bits), and the bounds follow from what an implementation does. Let u
be the unit roundoff of the accumulation dtype, and `chain` the number of additions that a rounding
error goes through. (In the kernels this is a block, whose sums are then added in double; in pure
JAX, where XLA adds one by one, it is all elements.) In any order of the elements

    |mean error| <= u*|mean| + chain*u*std      |var error| <= (chain+8)*u*var

The bounds for y and the gradients follow from these. Anything below the smallest normal number may
be flushed to zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import regimes
from cases import (
    Case,
    Cotangents,
    Form,
    Operands,
    Outcome,
    all_dtypes,
    both_implementations,
    call_inference,
    cases,
    cotangents,
    operands,
    operator,
    run,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import Array, each_input
from property_tests import example_count
from tiers import slow_except

from jax_bnar._base.implementation import Implementation

# Examples of the property test. Each is a compiled program that runs on every regime; `make check`
# tries ten times as many.
EXAMPLES = example_count(4)

# The number of squares that are added in the accumulation dtype before conversion to double: 32
# rows of two streams, or the vectors and the runs of a segment of a plane. Errors are smaller for
# sums of both signs around an element near the mean.
KERNEL_SQUARES = 64
KERNEL_CHAIN = 40
# Shapes in which the first elements, the first rows and the tails are in separate tiles.
LAYOUTS = (
    ((129, 9, 33), 1, 1),
    ((5, 64, 257), 0, 1),
    ((3, 4, 2051), 1, 1),
    ((8, 7, 1, 17), 2, 1),
    ((1000, 7, 2), 1, 4),
    ((4, 1000), 0, 1),
    ((40, 128, 15), 0, 1),
    ((64, 48), -1, 1),
    ((700, 3), -1, 2),
    ((6, 5, 4, 3, 16), -2, 1),
)


class Limits(NamedTuple):
    """Exact results, and the allowed error of each; tuples where there are several inputs."""

    exact: dict[str, oracle.PerInput]
    allowed: dict[str, oracle.PerInput]


def unit(dtype: Any) -> np.longdouble:
    return np.longdouble(oracle.unit_roundoff(dtype))


def smallest(dtype: Any) -> np.longdouble:
    return np.longdouble(float(ml_dtypes.finfo(jnp.dtype(dtype)).smallest_normal))


def rounded(exact: Array, dtype: Any) -> Array:
    return unit(dtype) * np.abs(exact) + smallest(dtype)


def total(array: Array) -> Array:
    return array.sum(axis=(1, 3), keepdims=True)


class Statistics(NamedTuple):
    """Exact statistics of canonical long doubles, and bounds on the errors."""

    centred: Array
    mean: Array
    var: Array
    mean_error: Array
    var_error: Array


def statistics(x: Array, case: Case, implementation: Implementation) -> Statistics:
    wide = oracle.canonical(x, case.axis, case.num_groups).astype(np.longdouble)
    count = wide.shape[1] * wide.shape[3]
    u, tiny = unit(case.statistics_dtype), smallest(case.statistics_dtype)
    # Sum differences from an element: with |mean| >> std, the extra 11 bits would not be enough.
    origin = wide[:, :1, :, :1]
    offset = total(wide - origin) / count
    mean, centred = origin + offset, (wide - origin) - offset
    var = total(np.square(centred)) / count
    # XLA adds one by one; the errors of so many additions rarely have the same sign.
    chain = KERNEL_CHAIN if implementation == "ffi" else KERNEL_CHAIN + count / 8
    var_chain = KERNEL_SQUARES if implementation == "ffi" else KERNEL_CHAIN + count / 2
    return Statistics(
        centred,
        mean,
        var,
        mean_error=u * (np.abs(mean) + chain * np.sqrt(var)) + 2 * tiny,
        var_error=(var_chain + 8) * u * var + 2 * tiny,
    )


class Normalised(NamedTuple):
    """One input of a sum as canonical long doubles, with bounds on the errors of an evaluation."""

    exact: Statistics
    scale: Array
    bias: Array
    rstd: Array
    of_rstd: Array  # the relative error of rstd
    of_centred: Array  # the absolute error of x - mean

    @property
    def a(self) -> Array:
        return self.scale * self.rstd

    def value(self) -> Array:
        return self.exact.centred * self.a + self.bias

    def error(self, case: Case) -> Array:
        u, tiny = unit(case.statistics_dtype), smallest(case.statistics_dtype)
        wide = self.exact.centred
        rounding = 4 * u * (np.abs(wide * self.a) + np.abs(self.bias))
        error = np.abs(self.a) * (self.of_centred + np.abs(wide) * (self.of_rstd + u))
        return error + rounding + 4 * tiny


def tensor(array: Array, case: Case) -> Array:
    return oracle.canonical(array, case.axis, case.num_groups).astype(np.longdouble)


def vector(array: Array | None, default: float, case: Case) -> Array:
    if array is None:
        return np.full((1, 1, case.channels, 1), default, np.longdouble)
    return np.asarray(array).astype(np.longdouble).reshape(-1, 1, case.channels, 1)


def normalised(
    case: Case, implementation: Implementation, x: Array, scale: Array | None, bias: Array | None
) -> Normalised:
    s = statistics(x, case, implementation)
    u, tiny = unit(case.statistics_dtype), smallest(case.statistics_dtype)
    rstd = 1 / np.sqrt(s.var + np.longdouble(case.epsilon))
    return Normalised(
        s,
        vector(scale, 1, case),
        vector(bias, 0, case),
        rstd,
        of_rstd=s.var_error * np.square(rstd) / 2 + 6 * u,
        of_centred=s.mean_error + u * np.abs(s.centred) + tiny,
    )


def limits(
    case: Case, implementation: Implementation, given: Operands, dout: Cotangents, y: Array
) -> Limits:
    """Limits for forward, and for backward with the ReLU's gate taken from `y`."""
    inputs = [
        normalised(case, implementation, *own)
        for own in each_input(given.x, given.scale, given.bias)
    ]
    u = unit(case.statistics_dtype)
    pre = functools.reduce(np.add, [one.value() for one in inputs])
    y_error = functools.reduce(np.add, [one.error(case) for one in inputs])
    if given.z is not None:
        z = tensor(given.z, case)
        pre, y_error = pre + z, y_error + 4 * u * np.abs(z)
    exact_y = np.maximum(pre, 0) if case.relu else pre

    dz = np.where(y > 0, dout.y, np.zeros_like(dout.y)) if case.relu else dout.y
    # In pure JAX, XLA may compute the y of the gate with a product contracted otherwise than in
    # forward, so that the two disagree about the sign of a y that is 0 within its rounding error.
    # The kernels repeat forward's operations exactly.
    undecided = np.zeros_like(pre)
    if case.relu and implementation == "xla":
        undecided = np.abs(tensor(dout.y, case)) * (np.abs(pre) <= y_error)
    results = [
        gradient_limits(case, implementation, one, tensor(dz, case), undecided, dmean, dvar)
        for one, dmean, dvar in zip(
            inputs,
            *([own[i] for own in each_input(given.x, dout.mean, dout.var)] for i in (1, 2)),
            strict=True,
        )
    ]
    exact: dict[str, Any] = {"y": [exact_y]}
    allowed: dict[str, Any] = {"y": [y_error + rounded(exact_y, case.dtype)]}
    for name in ("mean", "var"):
        exact[name] = [getattr(one.exact, name) for one in inputs]
        allowed[name] = [getattr(one.exact, f"{name}_error") for one in inputs]
    for name in ("dx", "dscale", "dbias"):
        exact[name] = [result[name][0] for result in results]
        allowed[name] = [result[name][1] for result in results]
    for name, parameters in (("dscale", given.scale), ("dbias", given.bias)):
        for i, (_, parameter) in enumerate(each_input(given.x, parameters)):
            if parameter is not None:
                # It is rounded once to the accumulation dtype, and once to that of the parameter.
                value = exact[name][i]
                extra = rounded(value, parameter.dtype) + 2 * u * np.abs(value)
                allowed[name][i] = allowed[name][i] + extra

    def as_given(name: str, values: list[Array], times: float) -> oracle.PerInput:
        arrays = tuple(_as_given(name, times * value, case) for value in values)
        return arrays if isinstance(given.x, tuple) and name != "y" else arrays[0]

    return Limits(
        {name: as_given(name, values, 1) for name, values in exact.items()},
        # The bounds are first-order, but with |mean| >> std products of two errors matter.
        {name: as_given(name, values, 1 + 2.0**-6) for name, values in allowed.items()},
    )


def gradient_limits(
    case: Case,
    implementation: Implementation,
    of_input: Normalised,
    e: Array,
    undecided: Array,
    dmean: Array | None,
    dvar: Array | None,
) -> dict[str, tuple[Array, Array]]:
    """The gradients of one input with their bounds, before they are rounded to a parameter's dtype.

    `undecided` is the magnitude of each cotangent of which it is open whether the gate stops it.
    """
    wide, rstd, a = of_input.exact.centred, of_input.rstd, of_input.a
    of_rstd, of_centred = of_input.of_rstd, of_input.of_centred
    count = wide.shape[1] * wide.shape[3]
    u, tiny = unit(case.statistics_dtype), smallest(case.statistics_dtype)
    dmean, dvar = vector(dmean, 0, case), vector(dvar, 0, case)
    sum_e, sum_ec = total(e), total(e * wide)
    dx = a * (e - sum_e / count - wide * np.square(rstd) * sum_ec / count)
    dx = dx + dmean / count + 2 * dvar * wide / count
    chain = (KERNEL_CHAIN if implementation == "ffi" else count) + 8
    abs_e, abs_ec = total(np.abs(e)), total(np.abs(e * wide))
    of_sum_e = chain * u * abs_e + tiny + total(undecided)
    of_sum_ec = chain * u * abs_ec + total(np.abs(e) * of_centred) + count * tiny
    of_sum_ec = of_sum_ec + total(undecided * np.abs(wide))
    # The rounding error of a mean far from 0 may be as large as x - mean itself.
    reach = np.abs(wide) + of_centred
    terms = np.abs(e) + abs_e / count + reach * np.square(rstd) * abs_ec / count
    dx_error = np.abs(a) * (
        (3 * of_rstd + 8 * u) * terms
        + undecided
        + of_sum_e / count
        + np.square(rstd) * (of_centred * abs_ec + reach * of_sum_ec) / count
    )
    dx_error = dx_error + 2 * np.abs(dvar) * (of_centred + 4 * u * np.abs(wide)) / count
    # The coefficients of x - mean and 1 are vectors of the accumulation dtype.
    dx_error = dx_error + 4 * u * np.abs(dmean) / count + tiny * (np.abs(wide) + 4)
    of_dscale = rstd * (of_sum_ec + of_rstd * abs_ec)
    return {
        "dx": (dx, dx_error + rounded(dx, case.dtype)),
        "dscale": ((sum_ec * rstd).sum(axis=0).ravel(), of_dscale.sum(axis=0).ravel()),
        "dbias": (sum_e.sum(axis=0).ravel(), of_sum_e.sum(axis=0).ravel()),
    }


def _as_given(name: str, array: Array, case: Case) -> Array:
    if name in ("y", "dx"):
        return array.reshape(case.shape)
    return array.reshape(case.statistics_shape) if name in ("mean", "var") else array


def balanced_cotangents(case: Case, x: oracle.PerInput) -> Cotangents:
    """Cotangents of mean and var that make all terms of dx matter, whatever the variance."""
    dout = cotangents(case)
    balanced = []
    for own_x, dmean, dvar in each_input(x, dout.mean, dout.var):
        var = statistics(own_x, case, "ffi").var.reshape(case.statistics_shape)
        rstd = (1 / np.sqrt(var + np.longdouble(case.epsilon))).astype(case.statistics_dtype)
        balanced.append((dmean * rstd, dvar * rstd * rstd))
    return Cotangents(dout.y, *oracle.per_input(x, balanced))


def check(case: Case, implementation: Implementation, given: Operands, label: str) -> Outcome:
    dout = balanced_cotangents(case, given.x)
    actual = run(case, implementation, given, dout)
    expected = limits(case, implementation, given, dout, actual.y)
    for name, exact in expected.exact.items():
        each = each_input(getattr(actual, name), exact, expected.allowed[name])
        for number, (got, wanted, allowed) in enumerate(each):
            if got is not None:
                title = f"{implementation}, {label}: {name}, input {number}"
                oracle.assert_within(title, got, wanted, allowed)
    return actual


@st.composite
def programs(draw: st.DrawFn) -> Case:
    """Half of the cases have any shape, the other half layouts that span several tiles."""
    case = draw(cases())
    if draw(st.booleans()):
        return case
    shape, axis, num_groups = draw(st.sampled_from(LAYOUTS))
    return Case(
        shape,
        axis,
        case.dtype,
        form=case.form,
        scale_dtype=case.scale_dtype,
        bias_dtype=case.bias_dtype,
        num_groups=num_groups,
        save=case.save,
        epsilon=case.epsilon,
        seed=case.seed,
    )


@pytest.mark.parametrize("implementation", slow_except({"ffi"}, ["ffi", "xla"]))
@settings(max_examples=EXAMPLES)
@given(case=programs())
# In these the rounding error of a mean far from 0 is as large as the standard deviation. Some have
# two elements; in others XLA computes x - mean twice in pure JAX, once with a contracted product.
@example(case=Case((2, 2), axis=0))
@example(case=Case((17, 2), axis=0, dtype="float64"))
@example(case=Case((64, 48), seed=2380))
@example(case=Case((4, 1000), axis=0, seed=574))
# In this one, in pure JAX, forward and backward disagree about the sign of a y next to 0.
@example(case=Case((3, 2, 3), axis=0, form="bn_relu", ratio=0.0))
# Two inputs whose statistics lose digits for different reasons.
@example(case=Case((129, 9, 33), 1, form="dual_bn_add_relu"))
@example(case=Case((40, 128, 15), 0, "bfloat16", "dual_bn_add_relu", save="mask"))
# Channels of two values, whose squares are all rounded alike.
@example(case=Case((40, 128, 15), 0, "float64", seed=33301511))
def test_within_bounds_in_every_regime(implementation: Implementation, case: Case) -> None:
    for i in range(len(regimes.NAMES)):
        given_operands, label = operands(case), []
        for number in range(case.inputs):
            # Another regime for each input, and others for the same input in the next round.
            own = regimes.NAMES[(i + 4 * number) % len(regimes.NAMES)]
            x = regimes.fill(case, own, case.seed + i + 100 * number)
            given_operands = given_operands.with_x(number, x)
            label.append(own)
        check(case, implementation, given_operands, ", ".join(label))


@both_implementations
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "num_groups"),
    [
        ((129, 9, 33), 1, "float64", 1),
        ((5, 64, 257), 0, "float64", 1),
        ((8, 7, 1, 17), 2, "float16", 1),
        ((1000, 7, 2), 1, "bfloat16", 4),
        ((4, 1000), 0, "float32", 1),
        ((100, 128, 15), 0, "bfloat16", 1),
    ],
)
def test_statistics_do_not_depend_on_where_outliers_are(
    implementation: Implementation, shape: tuple[int, ...], axis: int, dtype: str, num_groups: int
) -> None:
    case = Case(shape, axis, dtype, "batch_norm", None, None, num_groups)
    function = operator(case.form, implementation=implementation, **case.keywords)
    names = [name for name in regimes.NAMES if "outlier" in name or "row" in name]
    for seed, regime in enumerate([*names, *names, "padded", "padded", "padded"]):
        x = regimes.fill(case, regime, seed)
        expected = statistics(x, case, implementation)
        result = function(x, None, None, None)
        for name in ("mean", "var"):
            exact, allowed = (
                getattr(expected, n).reshape(case.statistics_shape) for n in (name, f"{name}_error")
            )
            oracle.assert_within(f"{regime}: {name}", getattr(result, name), exact, allowed)


@both_implementations
@all_dtypes
@pytest.mark.parametrize(("shape", "axis", "num_groups"), LAYOUTS[:5])
def test_constant_channels_have_no_variance(
    implementation: Implementation, dtype: str, shape: tuple[int, ...], axis: int, num_groups: int
) -> None:
    case = Case(shape, axis, dtype, "batch_norm", None, None, num_groups)
    along_channels = [1] * len(shape)
    along_channels[axis] = case.channels
    x: Any = np.broadcast_to(0.1 * (1 + np.arange(case.channels)).reshape(along_channels), shape)
    x = x.astype(jnp.dtype(dtype))
    result = operator(case.form, implementation=implementation, **case.keywords)(
        x, None, None, None
    )
    np.testing.assert_array_equal(result.var, np.zeros(case.statistics_shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "axis", "num_groups"), LAYOUTS)
def test_variance_of_padded_channels_is_no_worse_than_that_of_jnp(
    dtype: str, shape: tuple[int, ...], axis: int, num_groups: int
) -> None:
    case = Case(shape, axis, dtype, "batch_norm", None, None, num_groups)
    function = operator(case.form, implementation="ffi", **case.keywords)
    ours, theirs = [], []
    for seed in range(8):
        x = regimes.fill(case, "padded", seed)
        exact = statistics(x, case, "ffi").var.reshape(case.statistics_shape)
        wide: Any = oracle.canonical(x, case.axis, num_groups).astype(np.float32)
        plain = np.asarray(jnp.var(jnp.asarray(wide), axis=(1, 3))).reshape(exact.shape)
        var = np.asarray(function(x, None, None, None).var)
        ours.append(np.max(np.abs(var - exact) / exact))
        theirs.append(np.max(np.abs(plain - exact) / exact))
    # If both are exact up to the last rounding, which one is better is chance.
    assert max(ours) <= max(*theirs, 4 * oracle.unit_roundoff(np.float32))


# --- large values: rstd^3 is far below the smallest number ---------------------------------------

LARGE = [("float32", 1e13), ("float32", 1e15), ("bfloat16", 1e15), ("float64", 1e120)]


def large(dtype: str, size: float, form: Any = "bn_add_relu") -> tuple[Case, Operands]:
    case = Case((17, 2049), 1, dtype, form)
    # Avoid scales near 0, whose product with rstd^2 may be below the smallest number.
    given_operands = operands(case)
    scale = jax.tree.map(lambda scale: np.where(scale < 0, -1, 1) + scale, given_operands.scale)
    random = np.random.default_rng(1)
    for number in range(case.inputs):
        x = random.standard_normal(case.shape) * size
        given_operands = given_operands.with_x(number, x.astype(jnp.dtype(dtype)))
    return case, given_operands._replace(scale=scale)


@both_implementations
@pytest.mark.parametrize(("dtype", "size"), [*LARGE, ("float32", 1e17), ("bfloat16", 1e17)])
@pytest.mark.parametrize("form", ["bn_add_relu", "batch_norm", "dual_bn_add_relu"])
def test_gradients_of_large_values(
    implementation: Implementation, dtype: str, size: float, form: str
) -> None:
    case, given_operands = large(dtype, size, form)
    check(case, implementation, given_operands, f"|x| = {size}")


@both_implementations
@pytest.mark.parametrize(("dtype", "size"), LARGE)
def test_tangents_of_large_values(implementation: Implementation, dtype: str, size: float) -> None:
    case, given_operands = large(dtype, size, "batch_norm")
    x, _, scale, _ = given_operands
    function = operator(case.form, implementation=implementation, **case.keywords)
    x_dot = np.random.default_rng(2).standard_normal(case.shape).astype(x.dtype)
    y_dot = jax.jvp(lambda x: function(x, None, scale, None).y, (x,), (x_dot,))[1]
    wide, t = x.astype(np.longdouble), x_dot.astype(np.longdouble)
    centred = wide - wide.mean(axis=0)
    rstd = 1 / np.sqrt(np.square(centred).mean(axis=0) + case.epsilon)
    products = np.square(rstd) * (centred * t).mean(axis=0)
    expected = scale * rstd * (t - t.mean(axis=0) - centred * products)
    largest = np.abs(expected).max(axis=0)
    tolerance = 64 * unit(case.statistics_dtype) + 2 * unit(dtype)
    allowed = np.broadcast_to(tolerance * largest, case.shape)
    oracle.assert_within("y_dot", y_dot, expected, allowed)


@both_implementations
@pytest.mark.parametrize(("dtype", "size"), LARGE)
@pytest.mark.parametrize("form", ["batch_norm", "dual_bn_add_relu"])
def test_inference_gradients_of_large_values(
    implementation: Implementation, dtype: str, size: float, form: Form
) -> None:
    case, (x, _, *parameters) = large(dtype, size, form)
    given_mean, given_var = (
        np.full(case.channels, value, case.statistics_dtype) for value in (0, size**2)
    )
    scale, bias = jax.tree.map(lambda p: p.astype(case.statistics_dtype), parameters)
    mean, var = jax.tree.map(lambda _: given_mean, scale), jax.tree.map(lambda _: given_var, scale)
    dy = cotangents(case).y

    @jax.jit
    def results(*arrays: Any) -> Any:
        def function(x: Any, *vectors: Any) -> Any:
            keywords: Any = {"axis": 1, "implementation": implementation}
            return call_inference(form, x, None, *vectors, **keywords)

        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(dy)

    y, actual = jax.tree.map(np.asarray, results(x, scale, bias, mean, var))
    expected = oracle.inference_backward(
        dy,
        x,
        y if case.relu else None,
        scale,
        mean,
        var,
        epsilon=1e-5,
        axis=1,
        parameter_dtype=case.statistics_dtype,
    )
    rows = zip(("x", "scale", "bias", "mean", "var"), actual, (0, 2, 3, 4, 5), strict=True)
    for name, got, i in rows:
        oracle.assert_within(name, got, expected.gradients[i], expected.allowances[i])
