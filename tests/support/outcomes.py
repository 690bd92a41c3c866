"""Checks the results and the gradients of an operator against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import Case, Cotangents, Operands, Outcome
from oracle import each_input

from jax_bnar._base.implementation import Implementation


def chain_of_squares(implementation: Implementation) -> float:
    """How many times the error that the oracle allows a variance may have.

    XLA may add the squares one after the other, and then rounds once for each of them. Those of
    bfloat16 have few digits, so the roundings do not cancel: 448 of them were off by up to 72
    units, three times what the oracle allows.
    """
    return 4 if implementation == "xla" else 1


def expected_results(case: Case, given_operands: Operands) -> oracle.Forward:
    return oracle.forward(
        *given_operands,
        epsilon=case.epsilon,
        axis=case.axis,
        num_groups=case.num_groups,
        relu=case.relu,
        out_dtype=case.out_dtype,
    )


def check_results(
    case: Case,
    y: oracle.Array,
    mean: oracle.PerInput,
    var: oracle.PerInput,
    exact: oracle.Forward,
    *,
    chain: float = 1,
) -> None:
    """Allows the variance `chain` times the error that the oracle allows."""
    assert y.dtype == jnp.dtype(case.y_dtype)
    assert {v.dtype for v in jax.tree.leaves((mean, var))} == {np.dtype(case.statistics_dtype)}
    oracle.assert_within("mean", mean, exact.mean, exact.mean_allowance)
    oracle.assert_within("var", var, exact.var, exact.var_allowance, times=chain)
    oracle.assert_within("y", y, exact.y, exact.y_allowance)


def expected_gradients(
    case: Case, given_operands: Operands, dout: Cotangents, y: oracle.Array
) -> oracle.Backward:
    """The oracle's gradients with the gate of `y`, whose sign near 0 depends on rounding."""
    return oracle.backward(
        dout.y,
        given_operands.x,
        y if case.relu else None,
        given_operands.scale,
        dout.mean,
        dout.var,
        epsilon=case.epsilon,
        axis=case.axis,
        num_groups=case.num_groups,
    )


def check_gradients(
    case: Case, given_operands: Operands, dout: Cotangents, actual: Outcome
) -> None:
    expected = expected_gradients(case, given_operands, dout, actual.y)
    assert {dx.dtype for dx in jax.tree.leaves(actual.dx)} == {jnp.dtype(case.dtype)}
    oracle.assert_within("dx", actual.dx, expected.dx, expected.dx_allowance)
    if actual.dz is not None:
        assert actual.dz.dtype == jnp.dtype(case.y_dtype)
        np.testing.assert_array_equal(actual.dz, expected.dz)
    for name, parameters, gradients, exact, allowance in (
        ("scale", given_operands.scale, actual.dscale, expected.dscale, expected.dscale_allowance),
        ("bias", given_operands.bias, actual.dbias, expected.dbias, expected.dbias_allowance),
    ):
        for parameter, gradient, value, bound in each_input(
            parameters, gradients, exact, allowance
        ):
            assert (gradient is None) == (parameter is None)
            if gradient is not None:
                assert gradient.dtype == parameter.dtype
                rounding = oracle.rounding(value, parameter.dtype)
                oracle.assert_within(f"d{name}", gradient, value, bound + rounding)


def check_outcome(case: Case, given_operands: Operands, dout: Cotangents, actual: Outcome) -> None:
    """Checks all results and all gradients of one call."""
    exact = expected_results(case, given_operands)
    check_results(case, actual.y, actual.mean, actual.var, exact)
    check_gradients(case, given_operands, dout, actual)


def assert_same(left: Outcome, right: Outcome) -> None:
    """Asserts that all results and gradients are equal, bit for bit but for the sign of 0."""
    for name, a, b in zip(Outcome._fields, left, right, strict=True):
        compare = functools.partial(np.testing.assert_array_equal, err_msg=name)
        jax.tree.map(compare, a, b)
