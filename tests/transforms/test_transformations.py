"""jit, eager, scan, remat, donation and higher derivatives work as for any JAX operation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, all_dtypes, both_implementations, operands, unfused
from jax.test_util import check_grads
from programs import ours
from trees import assert_trees_close

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((6, 5, 17))
saves = pytest.mark.parametrize("save", ["y", "mask"])


def make_loss(implementation: Implementation, **keywords: Any) -> Any:
    """A loss that is linear in y, so that backward keeps y only if the operator needs it."""

    def loss(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        result = jax_bnar.bn_add_relu(x, z, scale, bias, implementation=implementation, **keywords)
        weights = jnp.linspace(-1, 1, x.size).astype(x.dtype).reshape(x.shape)
        return (result.y * weights).sum() + (result.mean * result.var).sum().astype(x.dtype)

    return loss


@both_implementations
@saves
def test_eager_jit_grad_and_value_and_grad_agree(
    implementation: Implementation, save: Save
) -> None:
    given, loss = operands(CASE), make_loss(implementation, save=save)
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


@saves
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_runs_what_the_policy_says(save: Save, policy: str) -> None:
    given, loss = operands(CASE), make_loss(None, save=save)
    rule, expected = POLICIES[policy]
    plain, remat = (
        jax.grad(function, (0, 1, 2, 3)) for function in (loss, jax.checkpoint(loss, policy=rule))
    )
    assert_trees_close(remat(*given), plain(*given))
    assert ours(jax.jit(remat), *given) == expected[save]


@both_implementations
def test_remat_of_either_implementation(implementation: Implementation) -> None:
    given, loss = operands(CASE), make_loss(implementation, save="mask")
    expected = jax.grad(loss, (0, 1, 2, 3))(*given)
    assert_trees_close(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2, 3)))(*given), expected)


@both_implementations
@saves
@all_dtypes
def test_donation(implementation: Implementation, save: Save, dtype: str) -> None:
    """Any result may overwrite a donated buffer, so kernels must not read it afterwards."""
    case = Case((16, 28, 33), dtype=dtype)
    given = operands(case)

    def step(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        function = make_loss(implementation, save=save)
        y = jax_bnar.bn_add_relu(x, z, scale, bias, implementation=implementation).y
        return y, jax.grad(function, (0, 1))(x, z, scale, bias)

    expected = jax.jit(step)(*given)
    donated = [jnp.array(array) for array in given]
    actual = jax.jit(step, donate_argnums=(0, 1))(*donated)
    assert donated[0].is_deleted()
    assert donated[1].is_deleted()
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


SMALL = Case((4, 3, 2), dtype="float64", scale_dtype="float64", bias_dtype="float64", seed=3)


def unfused_loss(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    y, mean, var = unfused(x, z, scale, bias)
    weights = jnp.linspace(-1, 1, x.size).astype(x.dtype).reshape(x.shape)
    return (y * weights).sum() + (mean * var).sum()


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
def test_second_order_of_inference(implementation: Implementation) -> None:
    x, z, scale, bias = operands(SMALL)
    mean, var = np.array([0.1, -0.2]), np.array([1.0, 2.0])

    def function(*given: Any) -> Any:
        return jax_bnar.bn_add_relu_inference(*given, implementation=implementation)

    # z moves every pre-activation well above or below 0, away from the kink.
    z = z + 9 * np.sign(z)
    check_grads(function, (x, z, scale, bias, mean, var), order=2, modes=["rev"], rtol=1e-5)
