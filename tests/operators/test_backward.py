"""Gradients of x, z, scale and bias, through y, mean and var, against the oracle."""

import dataclasses
import functools
from typing import Any

import numpy as np
import oracle
import pytest
from cases import (
    CORNER_SHAPES,
    RESNET_SHAPES,
    Case,
    Cotangents,
    Operands,
    Outcome,
    all_dtypes,
    both_implementations,
    cases,
    cotangents,
    layouts,
    operands,
    outcome,
    run,
    unfused,
)
from gradients import check_gradients, expected_gradients
from hypothesis import given, settings
from jax.test_util import check_grads

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick


def check(case: Case, implementation: Implementation) -> None:
    given_operands, dout = operands(case), cotangents(case)
    check_gradients(case, given_operands, dout, run(case, implementation, given_operands, dout))


@both_implementations
@settings(max_examples=25)
@given(case=cases())
def test_agrees_with_oracle(implementation: Implementation, case: Case) -> None:
    check(case, implementation)


@pytest.mark.parametrize(
    ("implementation", "dtype", "save"),
    [("ffi", "float32", "mask"), ("ffi", "bfloat16", "y"), ("xla", "float32", "mask")],
)
@layouts(CORNER_SHAPES | RESNET_SHAPES)
def test_shapes(
    implementation: Implementation, dtype: str, save: Save, shape: tuple[int, ...], axis: int
) -> None:
    check(Case(shape, axis, dtype, save=save), implementation)


@both_implementations
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("ratio", [1e3, 1e6])
def test_gradient_survives_large_means(
    implementation: Implementation, save: Save, ratio: float
) -> None:
    """Here, `b*x + k` instead of `b*(x-mean) + k` would be wrong by more than the gradient."""
    case = Case((2049, 16), ratio=ratio, save=save)
    given_operands, dout = operands(case), cotangents(case)
    actual = run(case, implementation, given_operands, dout)
    expected = expected_gradients(case, given_operands, dout, actual.y)
    wide = given_operands.x.astype(np.float64)
    # One ulp of the mean in units of std is the input error that no float32 mean can avoid.
    ulp_of_mean = np.max(np.abs(wide.mean(0)) / wide.std(0)) * 2.0**-23
    size = np.abs(expected.dx).max()
    assert np.abs(actual.dx - expected.dx).max() <= (1e-5 + ulp_of_mean) * size


@both_implementations
@pytest.mark.parametrize("form", ["bn_add_relu", "bn_relu", "batch_norm"])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_cotangents_of_statistics_alone(
    implementation: Implementation, form: Any, num_groups: int
) -> None:
    """A loss may use mean and var without y."""
    case = Case((6, 5, 17), form=form, dtype="float64", num_groups=num_groups)
    given_operands, dout = operands(case), cotangents(case)
    dout = dout._replace(y=np.zeros_like(dout.y))
    actual = run(case, implementation, given_operands, dout)
    check_gradients(case, given_operands, dout, actual)
    assert np.abs(actual.dx).max() > 0.01


@both_implementations
def test_y_and_mask_give_the_same_gradient(implementation: Implementation) -> None:
    given_operands, dout = operands(Case((5, 7, 9, 33))), cotangents(Case((5, 7, 9, 33)))
    with_y, with_mask = (
        run(Case((5, 7, 9, 33), save=save), implementation, given_operands, dout)
        for save in ("y", "mask")
    )
    for name, left, right in zip(Outcome._fields, with_y, with_mask, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


@both_implementations
@all_dtypes
@pytest.mark.parametrize("axis", [0, 1])
def test_sign_found_in_x_is_the_sign_of_y(
    implementation: Implementation, dtype: str, axis: int
) -> None:
    """Without a residual, backward recovers the sign from x and must round as forward did.

    Every second pre-activation is within a unit or two of float32 of 0. There the sign changes with
    a product contracted into an addition, a factor computed in another order, or float16 underflow.
    """
    case = Case((256, 65) if axis else (65, 256), axis, dtype, form="bn_relu")
    given_operands, dout = operands(case), cotangents(case)
    signs = np.where(np.arange(256) % 2, 1, -1)
    x = np.broadcast_to(signs[:, None] if axis else signs, case.shape).astype(dout.y.dtype)
    scale = np.abs(given_operands.scale) + np.float32(0.1)
    bias = (-scale.astype(np.float64) / np.sqrt(1 + case.epsilon)).astype(np.float32)
    near_zero = Operands(x, None, scale, bias)
    from_x, from_mask = (
        run(dataclasses.replace(case, save=save), implementation, near_zero, dout)
        for save in ("y", "mask")
    )
    for name, left, right in zip(Outcome._fields, from_x, from_mask, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


@both_implementations
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@layouts(RESNET_SHAPES)
def test_no_worse_than_unfused(
    implementation: Implementation, dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    case = Case(shape, axis, dtype)
    given_operands = operands(case)
    zeros = np.zeros(case.channels, np.float32)
    dout = Cotangents(cotangents(case).y, zeros, zeros)

    def mean_errors(actual: Outcome) -> dict[str, float]:
        """Errors against an oracle with the same gate: a flipped gate is an error of forward."""
        expected = expected_gradients(case, given_operands, dout, actual.y)
        return {
            name: float(np.abs(getattr(actual, name) - getattr(expected, name)).mean())
            for name in ("dx", "dscale", "dbias")
        }

    ours = mean_errors(run(case, implementation, given_operands, dout))
    theirs = mean_errors(outcome(functools.partial(unfused, axis=axis), given_operands, dout))
    # Which side is off by fewer float32 units on the vectors is chance; bfloat16's rounding is not.
    floor = 1e-5 * np.sqrt(np.prod(shape) / case.channels)
    # The two disagree about a few gates, which changes the mean error of dx by a few per mille; a
    # second rounding would add 40 %.
    limits = {"dx": 1.01 * theirs["dx"]} | {
        name: max(theirs[name], floor) for name in ("dscale", "dbias")
    }
    for name, error in ours.items():
        assert error <= limits[name], f"mean error of {name}: {error:.3e} > {limits[name]:.3e}"


@both_implementations
def test_check_grads(implementation: Implementation) -> None:
    """Compares with JAX's finite differences, which share no formula with the oracle."""
    case = Case((6, 3, 4), dtype="float64", scale_dtype="float64", bias_dtype="float64")
    # Keep pre-activations away from 0, where difference quotients would cross the kink.
    given_operands = operands(case)
    x, z, scale, bias = given_operands
    expected = oracle.forward(x, z, scale, bias, epsilon=case.epsilon, relu=False)
    pre = expected.y.astype(np.float64)
    z = np.where(np.abs(pre) < 0.1, z + 0.3 * np.sign(pre), z)

    def function(*arrays: Any) -> Any:
        return tuple(jax_bnar.bn_add_relu(*arrays, implementation=implementation))

    check_grads(function, (x, z, scale, bias), order=1, modes=["rev"], rtol=1e-6, atol=1e-6)
