"""`dual_bn_add_relu`, which adds two BatchNorms, against a float64 oracle."""

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
    all_dtypes,
    as_dtype,
    both_implementations,
    layouts,
)
from dual_cases import SHAPE, check_against_the_oracle, compiled, given
from exact_fill import arrange, exact_fill
from programs import ours

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick


@both_implementations
@all_dtypes
@pytest.mark.parametrize(
    "keywords",
    [{}, {"axis": 1, "save": "mask", "epsilon": 1e-2}, {"num_groups": 3}],
    ids=["nhwc", "nchw-mask", "groups"],
)
def test_agrees_with_the_oracle(implementation: Implementation, dtype: str, keywords: Any) -> None:
    check_against_the_oracle(SHAPE, dtype, implementation=implementation, **keywords)


@pytest.mark.parametrize(
    ("dtype", "save"),
    [
        ("bfloat16", "y"),
        ("float32", "mask"),
        pytest.param("bfloat16", "mask", marks=pytest.mark.slow),
        pytest.param("float32", "y", marks=pytest.mark.slow),
    ],
)
@layouts(CORNER_SHAPES | RESNET_SHAPES)
def test_corner_shapes(shape: tuple[int, ...], axis: int, dtype: str, save: Save) -> None:
    check_against_the_oracle(shape, dtype, implementation="ffi", axis=axis, save=save)


@pytest.mark.parametrize("save", ["y", "mask"])
def test_saves_no_array_from_before_the_relu(save: Save) -> None:
    arrays = given()
    result, vjp = jax.vjp(lambda *g: jax_bnar.dual_bn_add_relu(*g, save=save), *arrays)
    del result
    size = np.prod(SHAPE)
    saved = [np.asarray(v) for v in jax.tree.leaves(vjp)]
    full = [v.reshape(SHAPE) for v in saved if v.size == size]
    assert len(full) == 2
    for array in arrays[:2]:
        assert any(np.array_equal(array, v) for v in full)
    assert [v.size for v in saved if v.dtype == np.uint8] == ([105] if save == "mask" else [])


def test_is_one_operator_each_way() -> None:
    def loss(*g: Any) -> Any:
        return jnp.square(jax_bnar.dual_bn_add_relu(*g).y).sum()

    assert ours(loss, *given()) == {"dual_forward": 1}
    gradient = jax.grad(loss, argnums=tuple(range(6)))
    assert ours(gradient, *given()) == {"dual_forward": 1, "dual_backward": 1}


@all_dtypes
@pytest.mark.parametrize("absent", [(2, 5), (3, 4), (2, 3, 4, 5)], ids=str)
def test_vectors_may_be_absent(dtype: str, absent: tuple[int, ...]) -> None:
    """A scale that is None is 1 and a bias that is None is 0, in the gate of backward too."""
    there = given(dtype)
    neutral = [np.ones_like(v) if i in (2, 4) else np.zeros_like(v) for i, v in enumerate(there)]
    some = tuple(None if i in absent else v for i, v in enumerate(there))
    same = tuple(neutral[i] if i in absent else v for i, v in enumerate(there))
    run = compiled(implementation="ffi")
    random = np.random.default_rng(5)
    wide = "float64" if dtype == "float64" else "float32"
    dout = (
        as_dtype(random.standard_normal(SHAPE), dtype),
        *(as_dtype(random.standard_normal(7), wide) for _ in range(4)),
    )
    result, gradients = run(some, dout)
    expected, all_gradients = run(same, dout)
    jax.tree.map(np.testing.assert_array_equal, tuple(result), tuple(expected))
    for i, (gradient, other) in enumerate(zip(gradients, all_gradients, strict=True)):
        if i in absent:
            assert gradient is None
        else:
            np.testing.assert_array_equal(gradient, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("before", "channels", "after"), [((37,), 65, ()), ((4099,), 9, ()), ((5,), 24, (7, 7))]
)
def test_statistics_are_exact_where_sums_are(
    dtype: str, before: tuple[int, ...], channels: int, after: tuple[int, ...]
) -> None:
    count = int(np.prod(before + after))
    fill1, fill2 = (exact_fill(count, channels, dtype, seed) for seed in (1, 2))
    (x1, axis), (x2, _) = (arrange(fill.x, before, after) for fill in (fill1, fill2))
    nothing = (None,) * 4
    result = jax_bnar.dual_bn_add_relu(x1, x2, *nothing, axis=axis, implementation="ffi")
    np.testing.assert_array_equal(result.mean1, fill1.mean)
    np.testing.assert_array_equal(result.var1, fill1.var)
    np.testing.assert_array_equal(result.mean2, fill2.mean)
    np.testing.assert_array_equal(result.var2, fill2.var)


@both_implementations
@all_dtypes
@pytest.mark.parametrize("axis", [1, -1], ids=["nchw", "nhwc"])
def test_inference_agrees_with_the_oracle(
    implementation: Implementation, dtype: str, axis: int
) -> None:
    x1, x2, scale1, bias1, scale2, bias2 = given(dtype, axis)
    random = np.random.default_rng(4)
    wide = "float64" if dtype == "float64" else "float32"
    channels = SHAPE[axis]
    mean1, mean2 = (as_dtype(random.standard_normal(channels), wide) for _ in range(2))
    var1, var2 = (as_dtype(random.uniform(0.5, 2, channels), wide) for _ in range(2))
    dy = as_dtype(random.standard_normal(SHAPE), dtype)

    @jax.jit
    def both(dy: Any, *arrays: Any) -> Any:
        function = functools.partial(
            jax_bnar.dual_bn_add_relu_inference, axis=axis, implementation=implementation
        )
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(dy)

    arrays = (x1, x2, scale1, bias1, scale2, bias2, mean1, var1, mean2, var2)
    y, gradients = jax.tree.map(np.asarray, both(dy, *arrays))
    options = {"axis": axis, "epsilon": 1e-5}
    branch, branch_allowance = oracle.inference(
        as_dtype(x2, wide), None, scale2, bias2, mean2, var2, relu=False, **options
    )
    joined, allowance = oracle.inference(x1, branch, scale1, bias1, mean1, var1, **options)
    oracle.assert_within("y", y, joined, allowance + branch_allowance)
    for x, scale, mean, var, positions in (
        (x1, scale1, mean1, var1, (0, 2, 3, 6, 7)),
        (x2, scale2, mean2, var2, (1, 4, 5, 8, 9)),
    ):
        exact = oracle.inference_backward(
            dy, x, y, scale, mean, var, parameter_dtype=np.float32, **options
        )
        # Without that of z, which has no operand here.
        expected = [exact.gradients[i] for i in (0, 2, 3, 4, 5)]
        allowed = [exact.allowances[i] for i in (0, 2, 3, 4, 5)]
        for i, value, allowance in zip(positions, expected, allowed, strict=True):
            oracle.assert_within(f"gradient {i}", gradients[i], value, allowance)


def test_inference_is_one_pass() -> None:
    *arrays, var = (*given(), np.zeros(7, np.float32), np.ones(7, np.float32))
    statistics = (arrays.pop(), var) * 2
    function = jax_bnar.dual_bn_add_relu_inference
    assert ours(function, *arrays, *statistics) == {"dual_normalise": 1}


def test_inference_needs_its_statistics() -> None:
    vector = np.ones(7, np.float32)
    with pytest.raises(TypeError, match="dual_bn_add_relu_inference: var2 must be an array"):
        jax_bnar.dual_bn_add_relu_inference(*given(), vector, vector, vector, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x2": np.ones((3, 7), np.float32)}, ValueError, "x2 must have the shape of x1"),
        ({"x2": np.ones(SHAPE, np.float16)}, TypeError, "x2 must have the dtype of x1"),
        ({"x1": np.ones(7, np.float32)}, ValueError, "x1 must have at least 2 dimensions"),
        ({"x1": np.ones(SHAPE, np.int32)}, TypeError, "x1 must have one of the dtypes"),
        ({"axis_name": "absent"}, NameError, "absent"),
        ({"axis_index_groups": [[0]]}, ValueError, "axis_name is None"),
        ({"implementation": "cuda"}, ValueError, "implementation must be"),
        ({"x2": None}, TypeError, "x2 must be an array, got NoneType"),
        ({"scale1": np.ones(6, np.float32)}, ValueError, "scale1 must have shape"),
        ({"bias2": np.ones(6, np.float32)}, ValueError, "bias2 must have shape"),
        ({"scale2": np.ones(7, np.int32)}, TypeError, "scale2 must have a float dtype"),
        ({"axis": 4}, ValueError, r"axis must lie in .* for x1 of shape"),
        ({"save": "x"}, ValueError, "save must be"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be finite"),
        ({"num_groups": 4}, ValueError, "num_groups must divide the leading axis of x1"),
        ({"num_groups": 3, "axis": 0}, ValueError, "splits the leading axis of x1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_errors(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    names = ("x1", "x2", "scale1", "bias1", "scale2", "bias2")
    arguments = {**dict(zip(names, given(), strict=True)), **changes}
    with pytest.raises(error, match=words):
        jax_bnar.dual_bn_add_relu(**arguments)
