"""`dual_bn_add_relu`, which adds two BatchNorms, against a float64 oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, all_dtypes, as_dtype, both_implementations, operands
from programs import ours

import jax_bnar

pytestmark = pytest.mark.quick

SHAPE = (6, 5, 4, 7)


def given(dtype: str = "float32", axis: int = -1) -> tuple[Any, ...]:
    first = operands(Case(SHAPE, axis, dtype, seed=1))
    second = operands(Case(SHAPE, axis, dtype, seed=2))
    return first.x, second.x, first.scale, first.bias, second.scale, second.bias


@functools.cache
def compiled(**keywords: Any) -> Any:
    """A function that returns the results, and the gradients for cotangents of all five."""

    def both(given: Any, dout: Any) -> Any:
        result, vjp = jax.vjp(lambda *g: jax_bnar.dual_bn_add_relu(*g, **keywords), *given)
        return result, vjp(jax_bnar.DualBatchNormResult(*dout))

    return jax.jit(both)


@both_implementations
@all_dtypes
@pytest.mark.parametrize(
    "keywords",
    [{}, {"axis": 1, "save": "mask", "epsilon": 1e-2}, {"num_groups": 3}],
    ids=["nhwc", "nchw-mask", "groups"],
)
def test_agrees_with_the_oracle(implementation: str, dtype: str, keywords: Any) -> None:
    axis, groups = keywords.get("axis", -1), keywords.get("num_groups", 1)
    options = {"axis": axis, "num_groups": groups, "epsilon": keywords.get("epsilon", 1e-5)}
    arrays = given(dtype, axis)
    x1, x2, scale1, bias1, scale2, bias2 = arrays
    random = np.random.default_rng(3)
    statistic = (SHAPE[axis],) if groups == 1 else (groups, SHAPE[axis])
    dy = as_dtype(random.standard_normal(SHAPE), dtype)
    wide = "float64" if dtype == "float64" else "float32"
    dstatistics = [as_dtype(random.standard_normal(statistic), wide) for _ in range(4)]
    run = compiled(implementation=implementation, **keywords)
    result, gradients = jax.tree.map(np.asarray, run(arrays, (dy, *dstatistics)))

    branch = oracle.forward(x2, None, scale2, bias2, relu=False, **options)
    joined = oracle.forward(x1, branch.y, scale1, bias1, **options)
    # The normalised x2 is rounded to its dtype once, before it is added.
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


@pytest.mark.parametrize("save", ["y", "mask"])
def test_saves_no_array_from_before_the_relu(save: str) -> None:
    arrays = given()
    result, vjp = jax.vjp(lambda *g: jax_bnar.dual_bn_add_relu(*g, save=save), *arrays)
    size = np.prod(SHAPE)
    saved = [np.asarray(v) for v in jax.tree.leaves(vjp)]
    full = [v.reshape(SHAPE) for v in saved if v.size == size]
    expected = [*arrays[:2], *([result.y] if save == "y" else [])]
    assert len(full) == len(expected)
    for array in expected:
        assert any(np.array_equal(array, v) for v in full)
    assert [v.size for v in saved if v.dtype == np.uint8] == ([105] if save == "mask" else [])


def test_is_two_operators_each_way() -> None:
    def loss(*g: Any) -> Any:
        return jnp.square(jax_bnar.dual_bn_add_relu(*g).y).sum()

    assert ours(loss, *given()) == {"forward": 2}
    assert ours(jax.grad(loss, argnums=tuple(range(6))), *given()) == {"forward": 2, "backward": 2}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x2": np.ones((3, 7), np.float32)}, ValueError, "x2 must have the shape of x1"),
        ({"x2": np.ones(SHAPE, np.float16)}, TypeError, "x2 must have the dtype of x1"),
        ({"x2": None}, TypeError, "x2 must be an array, got NoneType"),
        ({"scale1": np.ones(6, np.float32)}, ValueError, "scale1 must have shape"),
        ({"bias2": np.ones(6, np.float32)}, ValueError, "bias2 must have shape"),
        ({"scale2": np.ones(7, np.int32)}, TypeError, "scale2 must have a float dtype"),
        ({"axis": 4}, ValueError, "axis must lie in"),
        ({"save": "x"}, ValueError, "save must be"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be finite"),
        ({"num_groups": 4}, ValueError, "num_groups must divide"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_errors(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    names = ("x1", "x2", "scale1", "bias1", "scale2", "bias2")
    arguments = {**dict(zip(names, given(), strict=True)), **changes}
    with pytest.raises(error, match=words):
        jax_bnar.dual_bn_add_relu(**arguments)
