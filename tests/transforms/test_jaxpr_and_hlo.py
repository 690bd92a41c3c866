"""There is one custom call forward and one backward, and backward keeps only what it needs.

This also tests that our comparisons are valid: the fused side is fused, and the others are not.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    FORMS,
    Case,
    Cotangents,
    Form,
    Operands,
    both_implementations,
    call,
    call_inference,
    cotangents,
    inputs_of,
    one_or_two_inputs,
    operands,
    operation_of,
    unfused,
)
from programs import hlo_calls, opcodes_of_size, ours, primitives, stablehlo_calls

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((4, 6, 5, 33))
SAVES = ["y", "mask"]


def target_of(form: Form, name: str) -> str:
    """The target of the custom call of an operation."""
    return f"jax_bnar_{operation_of(form, name)}_v1"


def of(form: Form) -> Operands:
    return operands(Case(CASE.shape, form=form))


def loss(form: Form, save: Save, implementation: Implementation) -> Any:
    """A training step's loss, which uses y and the statistics."""

    def function(*given: Any) -> Any:
        y, *statistics = call(form, *given, save=save, implementation=implementation)
        return (y**2).sum() + sum(vector.sum() for vector in jax.tree.leaves(statistics))

    return function


def unfused_loss(*given: Any) -> Any:
    result = unfused(*given)
    return (result.y**2).sum() + result.mean.sum() + result.var.sum()


def gradient(function: Any) -> Any:
    return jax.value_and_grad(function, argnums=(0, 1, 2, 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", SAVES)
def test_kernels_are_one_call_each(form: Form, save: Save) -> None:
    given = of(form)
    function = loss(form, save, "ffi")
    forward = {target_of(form, "forward"): 1}
    both = forward | {target_of(form, "backward"): 1}
    for count in (stablehlo_calls, hlo_calls):
        assert count(function, *given) == forward
        assert count(gradient(function), *given) == both


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", SAVES)
def test_default_binds_one_primitive_each(form: Form, save: Save) -> None:
    given = of(form)
    function = loss(form, save, None)
    forward = {operation_of(form, "forward"): 1}
    assert ours(function, *given) == forward
    assert ours(gradient(function), *given) == forward | {operation_of(form, "backward"): 1}


def test_default_is_the_kernel() -> None:
    """If the build has kernels for this platform, they are the default."""
    assert hlo_calls(loss("bn_add_relu", "y", None), *operands(CASE)) == {"jax_bnar_forward_v1": 1}


@one_or_two_inputs
def test_inference_kernel_is_one_call(form: Form) -> None:
    given = of(form)
    zeros, ones = jnp.zeros(33, np.float32), jnp.ones(33, np.float32)
    mean, var = (jax.tree.map(lambda _, v=v: v, given.scale) for v in (zeros, ones))

    def function(*given: Any) -> Any:
        everything: Any = (*given, mean, var)
        return (call_inference(form, *everything, implementation="ffi") ** 2).sum()

    normalise = {target_of(form, "normalise"): 1}
    assert hlo_calls(function, *given) == normalise
    # With a residual, dx is a multiple of dz.
    apply = "normalise" if form == "bn_add_relu" else "backward_apply"
    both = Counter([*normalise, target_of(form, "backward_reduce"), target_of(form, apply)])
    assert hlo_calls(gradient(function), *given) == both


@pytest.mark.parametrize(
    ("form", "function"),
    [
        ("bn_add_relu", loss("bn_add_relu", "y", "xla")),
        ("bn_add_relu", loss("bn_add_relu", "mask", "xla")),
        ("dual_bn_add_relu", loss("dual_bn_add_relu", "mask", "xla")),
        ("bn_add_relu", unfused_loss),
    ],
)
def test_comparison_sides_hold_none_of_our_calls(form: Form, function: Any) -> None:
    given = of(form)
    for program in (function, gradient(function)):
        assert ours(program, *given) == {}
        assert not stablehlo_calls(program, *given)
        assert not hlo_calls(program, *given)


def test_unfused_side_rounds_three_times() -> None:
    """The unfused side rounds the normalised tensor before it adds z, as users' code does."""
    given = operands(Case(CASE.shape, dtype="bfloat16"))
    jaxpr = jax.make_jaxpr(unfused)(*given)
    full = [
        equation.primitive.name
        for equation in jaxpr.eqns
        if equation.outvars[0].aval.shape == CASE.shape
        and equation.outvars[0].aval.dtype == jax.numpy.bfloat16
    ]
    # The conversion, the addition and the ReLU each make a bfloat16 tensor of full size.
    assert full[0] == "convert_element_type"
    assert "add" in full
    assert primitives(unfused, *given)["max"] == 1


def residuals(
    form: Form, save: Save, implementation: Implementation
) -> tuple[Any, list[np.ndarray]]:
    """y, and the arrays that backward keeps alive."""

    def function(*given: Any) -> Any:
        return call(form, *given, save=save, implementation=implementation)

    result, vjp = jax.vjp(function, *of(form))
    return result.y, [np.asarray(leaf) for leaf in jax.tree.leaves(vjp)]


def pre_activation(given: Operands) -> oracle.Array:
    """What the ReLU is applied to, without a residual."""
    exact = oracle.forward(given.x, None, given.scale, given.bias, epsilon=1e-5, relu=False)
    return exact.y.ravel()


@both_implementations
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", SAVES)
def test_residuals_hold_no_pre_relu_tensor(
    implementation: Implementation, form: Form, save: Save
) -> None:
    given = of(form)
    y, saved = residuals(form, save, implementation)
    full = [array.ravel() for array in saved if array.size >= y.size]
    expected = [x.ravel() for x in jax.tree.leaves(given.x)]
    if form == "bn_add_relu" and save == "y":
        expected.append(np.asarray(y).ravel())
    assert len(full) == len(expected)
    for array in expected:
        assert any(np.array_equal(array, other) for other in full)

    # The small ones are mean, var, scale and bias, and the mask with one bit per element.
    small = sorted(array.nbytes for array in saved if array.size < y.size)
    vectors = [33 * 4] * (4 * inputs_of(form))
    masked = form in ("bn_add_relu", "dual_bn_add_relu") and save == "mask"
    assert small == sorted(vectors + ([-(-y.size // 8)] if masked else []))

    if form != "batch_norm":
        pre = pre_activation(given)
        whole = pre if given.z is None else pre + given.z.ravel()
        for array in full:
            assert not np.allclose(array, pre, atol=1e-3)
            assert not np.allclose(array, whole, atol=1e-3)


@both_implementations
def test_residuals_in_the_jaxpr(implementation: Implementation) -> None:
    """The traced program agrees: only y and x leave forward as arrays of full size."""
    given = operands(CASE)

    def program(*given: Any) -> Any:
        result, vjp = jax.vjp(
            lambda *given: jax_bnar.bn_add_relu(*given, save="mask", implementation=implementation),
            *given,
        )
        return result.y, vjp

    avals = jax.make_jaxpr(program)(*given).out_avals
    size = given.x.size
    assert sum(aval.size >= size for aval in avals) == 2
    assert [aval.size for aval in avals if aval.dtype == np.uint8] == [-(-size // 8)]


@pytest.mark.parametrize("save", SAVES)
def test_forward_without_gradient_makes_no_mask(save: Save) -> None:
    jaxpr = jax.make_jaxpr(loss("bn_add_relu", save, None))(*operands(CASE))
    assert "u8[" not in str(jaxpr)


# Shapes and keywords. Some dimensions are 1: after global pooling, and of sequences.
CONTIGUOUS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((4, 6, 5, 32), {}),
    ((4, 32, 6, 5), {"axis": 1}),
    ((40, 32), {}),
    ((1, 6, 5, 3), {}),
    ((4, 6, 5, 32), {"num_groups": 2}),
    ((4, 32, 6, 5), {"axis": 1, "num_groups": 2}),
    ((40, 1, 1, 32), {}),
    ((40, 32, 1, 1), {"axis": 1}),
    ((4, 1, 6, 32), {}),
    ((1, 32, 1, 30), {"axis": 1}),
    ((40, 1, 1, 32), {"num_groups": 2}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("form", "shape", "keywords"),
    [
        *(("bn_add_relu", *each) for each in CONTIGUOUS),
        *(("dual_bn_add_relu", *CONTIGUOUS[i]) for i in (0, 5, 6)),
    ],
)
@pytest.mark.parametrize("save", SAVES)
def test_no_copy_of_an_array(
    form: Form, shape: tuple[int, ...], keywords: dict[str, Any], save: Save, dtype: str
) -> None:
    """XLA:CPU once copied every bfloat16 operand, to move its dimensions of size 1."""
    case = Case(shape, dtype=dtype, form=form, save=save, **keywords)

    def step(given: Operands, dout: Cotangents) -> Any:
        result, vjp = jax.vjp(
            lambda *given: tuple(call(form, *given, implementation="ffi", **case.keywords)), *given
        )
        return result, vjp(tuple(dout))

    size = int(np.prod(shape))
    moving = opcodes_of_size(size, step, operands(case), cotangents(case)) - {
        *("parameter", "bitcast", "custom-call", "get-tuple-element", "tuple")
    }
    assert not moving
