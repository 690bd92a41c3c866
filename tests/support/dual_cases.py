"""Operands of `dual_bn_add_relu`, and the check of a call against the oracle."""

import functools
from typing import Any

import jax
import numpy as np
import oracle
from cases import Case, as_dtype, operands

import jax_bnar

SHAPE = (6, 5, 4, 7)


def given(
    dtype: str = "float32", axis: int = -1, shape: tuple[int, ...] = SHAPE
) -> tuple[Any, ...]:
    """(x1, x2, scale1, bias1, scale2, bias2)."""
    first = operands(Case(shape, axis, dtype, seed=1))
    second = operands(Case(shape, axis, dtype, seed=2))
    return first.x, second.x, first.scale, first.bias, second.scale, second.bias


def cotangents(
    dtype: str = "float32", axis: int = -1, shape: tuple[int, ...] = SHAPE, num_groups: int = 1
) -> tuple[Any, ...]:
    """Those of y and of the four statistics."""
    random = np.random.default_rng(3)
    statistic = (shape[axis],) if num_groups == 1 else (num_groups, shape[axis])
    dy = as_dtype(random.standard_normal(shape), dtype)
    wide = "float64" if dtype == "float64" else "float32"
    return dy, *(as_dtype(random.standard_normal(statistic), wide) for _ in range(4))


@functools.cache
def compiled(**keywords: Any) -> Any:
    """A function that returns the results, and the gradients for cotangents of all five."""

    def both(given: Any, dout: Any) -> Any:
        result, vjp = jax.vjp(lambda *g: jax_bnar.dual_bn_add_relu(*g, **keywords), *given)
        return result, vjp(jax_bnar.DualBatchNormResult(*dout))

    return jax.jit(both)


def check_against_the_oracle(shape: tuple[int, ...], dtype: str, **keywords: Any) -> None:
    """Compares results and all gradients of one call."""
    axis, groups = keywords.get("axis", -1), keywords.get("num_groups", 1)
    options = {"axis": axis, "num_groups": groups, "epsilon": keywords.get("epsilon", 1e-5)}
    arrays = given(dtype, axis, shape)
    x1, x2, scale1, bias1, scale2, bias2 = arrays
    dy, *dstatistics = dout = cotangents(dtype, axis, shape, groups)
    result, gradients = jax.tree.map(np.asarray, compiled(**keywords)(arrays, dout))

    # Nothing is rounded to the dtype of x2 before it is added.
    wide = "float64" if dtype == "float64" else "float32"
    branch = oracle.forward(as_dtype(x2, wide), None, scale2, bias2, relu=False, **options)
    joined = oracle.forward(x1, branch.y, scale1, bias1, **options)
    oracle.assert_within("y", result.y, joined.y, joined.y_allowance + branch.y_allowance)
    for number, exact in ((1, joined), (2, branch)):
        for name in ("mean", "var"):
            oracle.assert_within(
                f"{name}{number}",
                getattr(result, f"{name}{number}"),
                getattr(exact, name),
                getattr(exact, f"{name}_allowance"),
            )

    dx1, dx2, *dvectors = gradients
    for x, scale, dx, (dscale, dbias), (dmean, dvar) in (
        (x1, scale1, dx1, dvectors[:2], dstatistics[:2]),
        (x2, scale2, dx2, dvectors[2:], dstatistics[2:]),
    ):
        exact = oracle.backward(
            dy, x, result.y, scale, dmean, dvar, parameter_dtype=np.float32, **options
        )
        oracle.assert_within("dx", dx, exact.dx, exact.dx_allowance)
        oracle.assert_within("dscale", dscale, exact.dscale, exact.dscale_allowance)
        oracle.assert_within("dbias", dbias, exact.dbias, exact.dbias_allowance)
