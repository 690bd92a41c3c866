"""jit, eager, scan, remat, donation and higher derivatives work as for any JAX operation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Case,
    Form,
    all_dtypes,
    both_implementations,
    call,
    call_inference,
    inputs_of,
    one_or_two_inputs,
    operands,
    operation_of,
    product_of_statistics,
    unfused,
)
from jax.test_util import check_grads
from programs import ours
from trees import assert_trees_close

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((6, 5, 17))
saves = pytest.mark.parametrize("save", ["y", "mask"])


def weighted(y: Any, mean: Any, var: Any) -> Any:
    """It is linear in y, so that backward keeps y only if the operator needs it."""
    weights = jnp.linspace(-1, 1, y.size).astype(y.dtype).reshape(y.shape)
    return (y * weights).sum() + product_of_statistics(mean, var).astype(y.dtype)


def make_loss(implementation: Implementation, form: Form = "bn_add_relu", **keywords: Any) -> Any:
    def loss(*given: Any) -> Any:
        return weighted(*call(form, *given, implementation=implementation, **keywords))

    return loss


@both_implementations
@one_or_two_inputs
@saves
def test_eager_jit_grad_and_value_and_grad_agree(
    implementation: Implementation, form: Form, save: Save
) -> None:
    given = operands(Case(CASE.shape, form=form))
    loss = make_loss(implementation, form, save=save)
    everything = tuple(range(4))
    value, gradients = jax.value_and_grad(loss, everything)(*given)
    assert_trees_close(loss(*given), value)
    assert_trees_close(jax.jit(loss)(*given), value)
    assert_trees_close(jax.grad(loss, everything)(*given), gradients)
    assert_trees_close(jax.jit(jax.value_and_grad(loss, everything))(*given), (value, gradients))


@both_implementations
@pytest.mark.parametrize("argument", range(4))
def test_gradient_of_one_operand(implementation: Implementation, argument: int) -> None:
    """The other operands are then constants, and their cotangents are dropped."""
    given, loss = operands(CASE), make_loss(implementation)
    all_gradients = jax.grad(loss, tuple(range(4)))(*given)
    assert_trees_close(jax.grad(loss, argument)(*given), all_gradients[argument])


@both_implementations
@saves
def test_scan(implementation: Implementation, save: Save) -> None:
    """A stack of equal blocks, like a residual network in a loop."""
    x, _, scale, bias = operands(CASE)
    scales, biases = np.stack([scale, scale / 2, -scale]), np.stack([bias, bias + 1, bias])

    def block(x: Any, parameters: Any) -> Any:
        y, mean, var = jax_bnar.bn_add_relu(
            x, x, *parameters, save=save, implementation=implementation
        )
        return y, (mean, var)

    def rolled(x: Any, scales: Any, biases: Any) -> Any:
        y, statistics = jax.lax.scan(block, x, (scales, biases))
        return (y * y).sum(), (y, statistics)

    def unrolled(x: Any, scales: Any, biases: Any) -> Any:
        statistics = []
        for parameters in zip(scales, biases, strict=True):
            x, one = block(x, parameters)
            statistics.append(one)
        return (x * x).sum(), (x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *statistics))

    gradients = [
        jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(x, scales, biases)
        for function in (rolled, unrolled)
    ]
    assert_trees_close(*gradients, tolerance=1e-4)


# The kernels in the gradient: forward may run twice, or only y is recomputed from the statistics.
ONCE = {"forward": 1, "backward": 1}
AGAIN = {"forward": 2, "backward": 1}
NORMALISED = {"forward": 1, "normalise": 1, "backward": 1}
POLICIES = {
    "nothing": (jax.checkpoint_policies.nothing_saveable, {"y": AGAIN, "mask": AGAIN}),
    "everything": (jax.checkpoint_policies.everything_saveable, {"y": ONCE, "mask": ONCE}),
    "statistics": (
        jax.checkpoint_policies.save_only_these_names("bnar_statistics"),
        {"y": NORMALISED, "mask": NORMALISED},
    ),
    "statistics and mask": (
        jax.checkpoint_policies.save_only_these_names("bnar_statistics", "bnar_mask"),
        {"y": NORMALISED, "mask": ONCE},
    ),
}


@one_or_two_inputs
@saves
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_runs_what_the_policy_says(form: Form, save: Save, policy: str) -> None:
    given, loss = operands(Case(CASE.shape, form=form)), make_loss(None, form, save=save)
    rule, of_one_input = POLICIES[policy]
    plain, remat = (
        jax.grad(function, (0, 1, 2, 3)) for function in (loss, jax.checkpoint(loss, policy=rule))
    )
    assert_trees_close(remat(*given), plain(*given))
    expected = of_one_input[save]
    if inputs_of(form) == 2:
        # Backward finds the sign in x instead of y, and so needs nothing but the statistics.
        if save == "y" and expected == NORMALISED:
            expected = ONCE
        expected = {operation_of(form, name): count for name, count in expected.items()}
    assert ours(jax.jit(remat), *given) == expected


@both_implementations
def test_remat_of_either_implementation(implementation: Implementation) -> None:
    given, loss = operands(CASE), make_loss(implementation, save="mask")
    expected = jax.grad(loss, (0, 1, 2, 3))(*given)
    assert_trees_close(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2, 3)))(*given), expected)


@both_implementations
@one_or_two_inputs
@saves
@all_dtypes
def test_donation(implementation: Implementation, form: Form, save: Save, dtype: str) -> None:
    """Any result may overwrite a donated buffer, so kernels must not read it afterwards."""
    given = tuple(operands(Case((16, 28, 33), dtype=dtype, form=form)))

    def step(*given: Any) -> Any:
        function = make_loss(implementation, form, save=save)
        y = call(form, *given, implementation=implementation).y
        return y, jax.grad(function, (0, 1))(*given)

    expected = jax.jit(step)(*given)
    donated = jax.tree.map(jnp.array, given)
    actual = jax.jit(step, donate_argnums=(0, 1))(*donated)
    assert all(tensor.is_deleted() for tensor in jax.tree.leaves(donated[:2]))
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


SMALL = Case((4, 3, 2), dtype="float64", scale_dtype="float64", bias_dtype="float64", seed=3)


def unfused_loss(*given: Any) -> Any:
    return weighted(*unfused(*given))


@both_implementations
@saves
def test_hessian(implementation: Implementation, save: Save) -> None:
    given = operands(SMALL)
    loss = make_loss(implementation, save=save)
    everything = (0, 1, 2, 3)
    assert_trees_close(
        jax.jit(jax.hessian(loss, everything))(*given),
        jax.jit(jax.hessian(unfused_loss, everything))(*given),
        tolerance=1e-8,
    )


@both_implementations
@saves
def test_forward_over_reverse_and_linearize(implementation: Implementation, save: Save) -> None:
    given = tuple(operands(SMALL))
    random = np.random.default_rng(5)
    tangents = tuple(random.standard_normal(array.shape) for array in given)

    def pushed_forward(loss: Any) -> Any:
        return jax.jit(functools.partial(jax.jvp, jax.grad(loss, (0, 1, 2, 3))))

    @jax.jit
    def linearized(given: Any, tangents: Any) -> Any:
        value, linear = jax.linearize(jax.grad(loss, (0, 1, 2, 3)), *given)
        return value, linear(*tangents)

    loss = make_loss(implementation, save=save)
    expected = pushed_forward(unfused_loss)(given, tangents)
    assert_trees_close(pushed_forward(loss)(given, tangents), expected, tolerance=1e-8)
    assert_trees_close(linearized(given, tangents), expected, tolerance=1e-8)


@both_implementations
def test_reverse_over_reverse(implementation: Implementation) -> None:
    """A gradient penalty: the gradient of the norm of a gradient."""
    given = tuple(operands(SMALL))

    def penalty(loss: Any) -> Any:
        return lambda *given: jnp.square(jax.grad(loss)(*given)).sum()

    actual = jax.jit(jax.grad(penalty(make_loss(implementation)), (0, 1, 2, 3)))(*given)
    expected = jax.jit(jax.grad(penalty(unfused_loss), (0, 1, 2, 3)))(*given)
    assert_trees_close(actual, expected, tolerance=1e-8)


@both_implementations
@one_or_two_inputs
def test_second_order_of_inference(implementation: Implementation, form: Form) -> None:
    x, z, scale, bias = operands(dataclasses.replace(SMALL, form=form))
    statistics = (np.array([0.1, -0.2]), np.array([1.0, 2.0]))
    mean, var = (jax.tree.map(lambda _, v=v: v, scale) for v in statistics)

    def function(*given: Any) -> Any:
        return call_inference(form, *given, implementation=implementation)

    # This moves every pre-activation well above or below 0, away from the kink.
    if form == "bn_add_relu":
        z = z + 9 * np.sign(z)
    else:
        bias = tuple(b + 30 * np.sign(bias[0]) for b in bias)
    check_grads(function, (x, z, scale, bias, mean, var), order=2, modes=["rev"], rtol=1e-5)
