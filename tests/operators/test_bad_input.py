"""Bad input raises at trace time; messages name the operand, what was given and expected."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import both_implementations

import jax_bnar

pytestmark = pytest.mark.quick

TRAINING = {
    "bn_add_relu": jax_bnar.bn_add_relu,
    "bn_relu": lambda x, z, *rest, **keywords: jax_bnar.bn_relu(x, *rest, **keywords),
    "batch_norm": lambda x, z, *rest, **keywords: jax_bnar.batch_norm(x, *rest, **keywords),
    "dual_bn_add_relu": jax_bnar.dual_bn_add_relu,
    "batch_statistics": lambda x, z, scale, bias, **k: jax_bnar.batch_statistics(x, **k),
}
# What the statistics depend on; z is only there to have the shape of x.
OF_STATISTICS = {"x", "z", "axis", "axis_name", "axis_index_groups", "num_groups", "implementation"}
INFERENCE = {
    "bn_add_relu_inference": jax_bnar.bn_add_relu_inference,
    "bn_relu_inference": lambda x, z, *rest, **k: jax_bnar.bn_relu_inference(x, *rest, **k),
    "batch_norm_inference": lambda x, z, *rest, **k: jax_bnar.batch_norm_inference(x, *rest, **k),
    "dual_bn_add_relu_inference": jax_bnar.dual_bn_add_relu_inference,
}
EVERY = list(TRAINING | INFERENCE)
# With a tensor that must be like x: z, or x2.
RESIDUAL = [name for name in EVERY if "add" in name]
# The operand with two inputs that is wrong where these are with one.
OF_TWO = {
    "x": "x1",
    "z": "x2",
    "scale": "scale2",
    "bias": "bias1",
    "mean": "mean2",
    "var": "var1",
}

ones = functools.partial(np.ones, dtype=np.float32)


def operand(function: str, name: str) -> str:
    """The operand of this function that has the role of `name`."""
    return OF_TWO.get(name, name) if function.startswith("dual") else name


def call(function: str, **changes: Any) -> Callable[[], Any]:
    """A function that makes a valid call of the operator with some arguments replaced."""
    if function.startswith("dual"):
        names = ["x1", "x2", "scale1", "bias1", "scale2", "bias2"]
        statistics = ["mean1", "var1", "mean2", "var2"]
    else:
        names, statistics = ["x", "z", "scale", "bias"], ["mean", "var"]
    if function in INFERENCE:
        names += statistics
    arguments: dict[str, Any] = {
        name: ones((4, 5, 6)) if name[0] in "xz" else ones(6) for name in names
    }
    arguments |= {operand(function, name): value for name, value in changes.items()}
    arrays = [arguments.pop(name) for name in names]
    operator: Callable[..., Any] = (TRAINING | INFERENCE)[function]
    return lambda: operator(*arrays, **arguments)


def assert_raises(
    error: type[Exception], function: str, fragments: tuple[str, ...], **changes: Any
) -> None:
    with pytest.raises(error) as raised:
        call(function, **changes)()
    assert type(raised.value) is error
    message = str(raised.value)
    for fragment in (function, *(operand(function, fragment) for fragment in fragments)):
        assert fragment in message, f"{fragment!r} not in: {message}"


@pytest.mark.parametrize("function", EVERY)
def test_the_good_call_is_good(function: str) -> None:
    call(function)()


# The changed arguments, the error, and fragments of its message: operand, given, expected.
EVERYWHERE: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"x": np.ones((4, 5, 6), np.int32)}, TypeError, ("x", "int32", "float32", "bfloat16")),
    ({"x": np.ones((4, 5, 6), bool)}, TypeError, ("x", "bool", "float32")),
    ({"x": np.ones((4, 5, 6), np.complex64)}, TypeError, ("x", "complex64", "float32")),
    ({"x": ones(6), "z": ones(6)}, ValueError, ("x", "(6,)", "2 dimensions")),
    ({"x": ones(()), "z": ones(())}, ValueError, ("x", "()", "2 dimensions")),
    ({"x": [[1.0, 2.0]]}, TypeError, ("x", "array", "list")),
    (
        {"x": jax.ShapeDtypeStruct((4, 5, 6), np.float32)},
        TypeError,
        ("x", "array that JAX takes", "ShapeDtypeStruct", "float32"),
    ),
    ({"x": np.ones((4, 5, 6), ">f4")}, TypeError, ("x", "array that JAX takes", ">f4")),
    ({"x": np.full((4, 5, 6), None)}, TypeError, ("x", "array that JAX takes", "object")),
    (
        {"scale": ones(5)},
        ValueError,
        ("scale", "(5,)", "(6,)", "(4, 5, 6)", "if axis 1 of ", " is that of the channels"),
    ),
    ({"scale": ones((1, 6))}, ValueError, ("scale", "(1, 6)", "(6,)")),
    ({"scale": ones(())}, ValueError, ("scale", "()", "(6,)")),
    ({"scale": 1.0}, TypeError, ("scale", "array", "float")),
    ({"scale": np.ones(6, np.int32)}, TypeError, ("scale", "int32", "float")),
    ({"bias": ones(7)}, ValueError, ("bias", "(7,)", "(6,)")),
    ({"bias": np.ones(6, np.int64)}, TypeError, ("bias", "int64", "float")),
    ({"axis": 3}, ValueError, ("axis", "3", "[-3, 3)", "(4, 5, 6)")),
    ({"axis": -4}, ValueError, ("axis", "-4", "[-3, 3)")),
    ({"axis": 1.5}, TypeError, ("axis", "1.5", "integer")),
    ({"axis": (1, 2)}, TypeError, ("axis", "(1, 2)", "integer")),
    ({"axis": 1}, ValueError, ("(6,)", "(5,)", "axis 1")),
    ({"epsilon": 0.0}, ValueError, ("epsilon", "0.0", "> 0")),
    ({"epsilon": 0}, ValueError, ("epsilon", "0", "> 0")),
    ({"epsilon": -1e-5}, ValueError, ("epsilon", "-1e-05", "> 0")),
    ({"epsilon": math.nan}, ValueError, ("epsilon", "nan", "> 0")),
    ({"epsilon": math.inf}, ValueError, ("epsilon", "inf", "finite")),
    ({"epsilon": 1e39}, ValueError, ("epsilon", "at most 3.4e+38", "1e+39")),
    ({"epsilon": 10**400}, ValueError, ("epsilon", "inf", "finite")),
    ({"epsilon": np.array(True)}, TypeError, ("epsilon", "True", "number")),
    ({"epsilon": "1e-5"}, TypeError, ("epsilon", "str", "number")),
    ({"epsilon": None}, TypeError, ("epsilon", "NoneType", "number")),
    ({"implementation": "cuda"}, ValueError, ("implementation", "'cuda'", "'ffi'", "'xla'")),
    ({"implementation": np.array(["ffi"])}, ValueError, ("implementation", "'ffi'", "'xla'")),
    ({"implementation": True}, ValueError, ("implementation", "True", "'ffi'", "'xla'")),
]


def takes(function: str, changes: dict[str, Any]) -> bool:
    """Whether these changes are invalid for this function."""
    if function != "batch_statistics":
        return True
    return changes.keys() <= OF_STATISTICS and changes != {"axis": 1}  # valid without parameters


@pytest.mark.parametrize(
    ("function", "changes", "error", "fragments"),
    [
        pytest.param(function, *each, id=f"{i}-{function}")
        for i, each in enumerate(EVERYWHERE)
        for function in EVERY
        if takes(function, each[0])
    ],
)
def test_every_operator(
    function: str,
    changes: dict[str, Any],
    error: type[Exception],
    fragments: tuple[str, ...],
) -> None:
    assert_raises(error, function, fragments, **changes)


TRAINING_ONLY: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"x": ones((0, 5, 6)), "z": ones((0, 5, 6))}, ValueError, ("x", "empty", "(0, 5, 6)")),
    ({"x": ones((4, 5, 0)), "z": ones((4, 5, 0))}, ValueError, ("x", "empty", "(4, 5, 0)")),
    ({"num_groups": 3}, ValueError, ("num_groups", "3", "(4, 5, 6)", "divide")),
    ({"num_groups": 8}, ValueError, ("num_groups", "8", "(4, 5, 6)", "divide")),
    ({"num_groups": 0}, ValueError, ("num_groups", "0", "at least 1")),
    ({"num_groups": -2}, ValueError, ("num_groups", "-2", "at least 1")),
    ({"num_groups": True}, TypeError, ("num_groups", "True", "integer", "bool")),
    ({"num_groups": 2.0}, TypeError, ("num_groups", "2.0", "integer")),
    (
        {"num_groups": 2, "axis": 0},
        ValueError,
        ("num_groups", "2", "axis=0"),
    ),
    ({"save": "x"}, ValueError, ("save", "'x'", "'y'", "'mask'")),
    ({"save": None}, ValueError, ("save", "None", "'y'", "'mask'")),
    ({"save": np.array(["y", "y"])}, ValueError, ("save", "array", "'y'", "'mask'")),
    ({"axis_name": 0}, TypeError, ("axis_name", "0", "name of an axis")),
    ({"axis_name": ("a", {})}, TypeError, ("axis_name", "{}", "name of an axis")),
    ({"axis_name": ("a", ("b", "a"))}, ValueError, ("axis_name", "twice", "'b'")),
    ({"axis_index_groups": [[0], [1]]}, ValueError, ("axis_index_groups", "axis_name is None")),
    *(
        (
            {"axis_name": "a", "axis_index_groups": groups},
            error,
            ("axis_index_groups", str(groups), words),
        )
        for groups, error, words in (
            (3, TypeError, "list of lists"),
            ([["x"]], TypeError, "list of lists"),
            ([[0], [2]], ValueError, "exactly once"),
            ([[0, 1], [1]], ValueError, "exactly once"),
            ([[0], []], ValueError, "exactly once"),
        )
    ),
]


@pytest.mark.parametrize(
    ("function", "changes", "error", "fragments"),
    [
        pytest.param(function, *each, id=f"{i}-{function}")
        for i, each in enumerate(TRAINING_ONLY)
        for function in TRAINING
        if takes(function, each[0])
    ],
)
def test_training_operators(
    function: str,
    changes: dict[str, Any],
    error: type[Exception],
    fragments: tuple[str, ...],
) -> None:
    assert_raises(error, function, fragments, **changes)


@pytest.mark.parametrize("function", RESIDUAL)
@pytest.mark.parametrize(
    ("z", "error", "fragments"),
    [
        (ones((4, 5, 1)), ValueError, ("(4, 5, 1)", "(4, 5, 6)", "broadcast")),
        (ones((4, 6, 5)), ValueError, ("(4, 6, 5)", "(4, 5, 6)")),
        (ones(6), ValueError, ("(6,)", "(4, 5, 6)")),
        (jnp.ones((4, 5, 6), jnp.bfloat16), TypeError, ("bfloat16", "float32")),
        (np.ones((4, 5, 6), np.int32), TypeError, ("int32", "float32")),
        (None, TypeError, ("None", "array")),
        (0.0, TypeError, ("float", "array")),
    ],
)
def test_residual(
    function: str, z: Any, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    assert_raises(error, function, ("z", *fragments), z=z)


@pytest.mark.parametrize("function", INFERENCE)
@pytest.mark.parametrize("name", ["mean", "var"])
@pytest.mark.parametrize(
    ("value", "error", "fragments"),
    [
        (ones(5), ValueError, ("(5,)", "(6,)")),
        (ones((1, 6)), ValueError, ("(1, 6)", "(6,)")),
        (np.ones(6, np.int32), TypeError, ("int32", "float")),
        (None, TypeError, ("None", "array")),
    ],
)
def test_statistics_of_inference(
    function: str, name: str, value: Any, error: type[Exception], fragments: tuple[str, ...]
) -> None:
    if error is ValueError:  # which tensor has the channels
        fragments = (*fragments, f"of {operand(function, 'x')}, whose shape is (4, 5, 6)")
    assert_raises(error, function, (name, *fragments), **{name: value})


@both_implementations
def test_raised_while_tracing(implementation: str) -> None:
    """The error is raised before anything runs: eval_shape only traces."""
    with pytest.raises(ValueError, match=re.escape("(4, 5, 1)")):
        jax.eval_shape(call("bn_add_relu", z=ones((4, 5, 1)), implementation=implementation))


@pytest.mark.parametrize(("name", "value"), [("epsilon", 1e-5), ("axis", 1), ("num_groups", 1)])
def test_a_traced_number_names_the_remedy(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} .* static"):
        jax.jit(lambda value: call("bn_relu", **{name: value})())(value)


def test_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BNAR_IMPLEMENTATION", "fast")
    assert_raises(ValueError, "bn_relu", ("JAX_BNAR_IMPLEMENTATION", "'fast'", "'ffi'", "'xla'"))
