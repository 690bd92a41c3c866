"""Checks the gradients of an operator against the oracle."""

import numpy as np
import oracle
from cases import Case, Cotangents, Operands, Outcome


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
    assert actual.dx.dtype == given_operands.x.dtype
    oracle.assert_within("dx", actual.dx, expected.dx, expected.dx_allowance)
    if actual.dz is not None:
        np.testing.assert_array_equal(actual.dz, expected.dz)
    for name, gradient, exact, allowance in (
        ("scale", actual.dscale, expected.dscale, expected.dscale_allowance),
        ("bias", actual.dbias, expected.dbias, expected.dbias_allowance),
    ):
        parameter = getattr(given_operands, name)
        assert (gradient is None) == (parameter is None)
        if gradient is not None:
            assert gradient.dtype == parameter.dtype
            rounding = oracle.unit_roundoff(parameter.dtype) * np.abs(exact)
            oracle.assert_within(f"d{name}", gradient, exact, allowance + rounding)
