"""There is one custom call forward and one backward, and backward keeps only what it needs.

This also tests that our comparisons are valid: the fused side is fused, and the others are not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, both_implementations, operands, unfused
from programs import hlo_calls, opcodes_of_size, ours, primitives, stablehlo_calls

import jax_bnar
from jax_bnar import reference
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((4, 6, 5, 33))
FORMS = ["bn_add_relu", "bn_relu", "batch_norm"]
SAVES = ["y", "mask"]


def loss(form: str, save: Save, implementation: Implementation) -> Any:
    """A training step's loss, which uses y and the statistics."""

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        tensors = (x, z) if form == "bn_add_relu" else (x,)
        result = getattr(jax_bnar, form)(
            *tensors, scale, bias, save=save, implementation=implementation
        )
        return (result.y**2).sum() + result.mean.sum() + result.var.sum()

    return function


def unfused_loss(*given: Any) -> Any:
    result = unfused(*given)
    return (result.y**2).sum() + result.mean.sum() + result.var.sum()


def gradient(function: Any) -> Any:
    return jax.value_and_grad(function, argnums=(0, 1, 2, 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", SAVES)
def test_kernels_are_one_call_each(form: str, save: Save) -> None:
    given = operands(CASE)
    function = loss(form, save, "ffi")
    forward = {"jax_bnar_forward_v1": 1}
    both = forward | {"jax_bnar_backward_v1": 1}
    for count in (stablehlo_calls, hlo_calls):
        assert count(function, *given) == forward
        assert count(gradient(function), *given) == both


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", SAVES)
def test_default_binds_one_primitive_each(form: str, save: Save) -> None:
    given = operands(CASE)
    function = loss(form, save, None)
    assert ours(function, *given) == {"forward": 1}
    assert ours(gradient(function), *given) == {"forward": 1, "backward": 1}


def test_default_is_the_kernel() -> None:
    """If the build has kernels for this platform, they are the default."""
    assert hlo_calls(loss("bn_add_relu", "y", None), *operands(CASE)) == {"jax_bnar_forward_v1": 1}


def test_inference_kernel_is_one_call() -> None:
    given = operands(CASE)
    mean, var = jnp.zeros(33, np.float32), jnp.ones(33, np.float32)

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = jax_bnar.bn_add_relu_inference(x, z, scale, bias, mean, var, implementation="ffi")
        return (y**2).sum()

    assert hlo_calls(function, *given) == {"jax_bnar_normalise_v1": 1}
    assert hlo_calls(gradient(function), *given) == {
        "jax_bnar_normalise_v1": 1,
        "jax_bnar_backward_reduce_v1": 1,
        "jax_bnar_backward_apply_v1": 1,
    }


@pytest.mark.parametrize(
    "function", [loss("bn_add_relu", "y", "xla"), loss("bn_add_relu", "mask", "xla"), unfused_loss]
)
def test_comparison_sides_hold_none_of_our_calls(function: Any) -> None:
    given = operands(CASE)
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
    form: str, save: Save, implementation: Implementation
) -> tuple[Any, list[np.ndarray]]:
    """y, and the arrays that backward keeps alive."""
    given = operands(CASE)

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        tensors = (x, z) if form == "bn_add_relu" else (x,)
        return getattr(jax_bnar, form)(
            *tensors, scale, bias, save=save, implementation=implementation
        )

    result, vjp = jax.vjp(function, *given)
    return result.y, [np.asarray(leaf) for leaf in jax.tree.leaves(vjp)]


@both_implementations
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", SAVES)
def test_residuals_hold_no_pre_relu_tensor(
    implementation: Implementation, form: str, save: Save
) -> None:
    x, z, scale, bias = operands(CASE)
    y, saved = residuals(form, save, implementation)
    full = [array.ravel() for array in saved if array.size >= x.size]
    expected = [x.ravel()]
    if form == "bn_add_relu" and save == "y":
        expected.append(np.asarray(y).ravel())
    assert len(full) == len(expected)
    for array in expected:
        assert any(np.array_equal(array, other) for other in full)

    # The small ones are mean, var, scale, bias, and the mask with one bit per element.
    small = sorted(array.nbytes for array in saved if array.size < x.size)
    vectors = [x.shape[-1] * 4] * 4
    masked = form != "batch_norm" and save == "mask"
    assert small == sorted(vectors + ([-(-x.size // 8)] if masked else []))

    pre, *_ = reference.normalise(
        x.reshape(1, -1, 33, 1),
        None if form != "bn_add_relu" else z.reshape(1, -1, 33, 1),
        scale.reshape(1, 33),
        bias.reshape(1, 33),
        *reference.statistics(x.reshape(1, -1, 33, 1)),
        epsilon=1e-5,
        activation="none",
        save_mask=False,
    )
    if form != "batch_norm":
        for array in full:
            assert not np.allclose(array, np.asarray(pre).ravel(), atol=1e-3)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "keywords"),
    [
        ((4, 6, 5, 32), {}),
        ((4, 32, 6, 5), {"axis": 1}),
        ((40, 32), {}),
        ((1, 6, 5, 3), {}),
        ((4, 6, 5, 32), {"num_groups": 2}),
        ((4, 32, 6, 5), {"axis": 1, "num_groups": 2}),
        # Dimensions of size 1: after global pooling, and of sequences.
        ((40, 1, 1, 32), {}),
        ((40, 32, 1, 1), {"axis": 1}),
        ((4, 1, 6, 32), {}),
        ((1, 32, 1, 30), {"axis": 1}),
        ((40, 1, 1, 32), {"num_groups": 2}),
    ],
)
@pytest.mark.parametrize("save", SAVES)
def test_no_copy_of_an_array(
    shape: tuple[int, ...], keywords: dict[str, Any], save: Save, dtype: str
) -> None:
    """XLA:CPU once copied every bfloat16 operand, to move its dimensions of size 1."""
    x = jnp.ones(shape, dtype)
    channels = shape[keywords.get("axis", -1)]
    vector = jnp.ones(channels, jnp.float32)
    statistic = jnp.ones((2, channels) if "num_groups" in keywords else (channels,), jnp.float32)

    def step(x: Any, z: Any, scale: Any, bias: Any, dy: Any, dstatistic: Any) -> Any:
        result, vjp = jax.vjp(
            lambda *given: jax_bnar.bn_add_relu(
                *given, save=save, implementation="ffi", **keywords
            ),
            *(x, z, scale, bias),
        )
        return result, vjp(jax_bnar.BatchNormResult(dy, dstatistic, dstatistic))

    moving = opcodes_of_size(x.size, step, x, x, vector, vector, x, statistic) - {
        *("parameter", "bitcast", "custom-call", "get-tuple-element", "tuple")
    }
    assert not moving
