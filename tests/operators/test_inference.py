"""The inference forms and the gradients of all six operands (frozen statistics)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    FORMS,
    Case,
    Form,
    as_dtype,
    both_implementations,
    call,
    call_inference,
    cases,
    cotangents,
    one_or_two_inputs,
    operands,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

Six = tuple[Any, Any, Any, Any, Any, Any]
statistic_dtypes = st.sampled_from(["float32", "float64", "bfloat16"])


def six_operands(case: Case, mean_dtype: str = "float32", var_dtype: str = "float32") -> Six:
    given_operands = operands(case)
    random = np.random.default_rng(case.seed + 2)
    each = [
        (
            as_dtype(random.standard_normal(case.channels), mean_dtype),
            as_dtype(random.uniform(0.1, 4, case.channels), var_dtype),
        )
        for _ in range(case.inputs)
    ]
    return (*given_operands, *oracle.per_input(given_operands.x, each))  # type: ignore[return-value]


def check(case: Case, implementation: Implementation, six: Six) -> None:
    keywords = case.inference_keywords
    layout: dict[str, Any] = {"epsilon": case.epsilon, "axis": case.axis}
    dy = cotangents(case).y

    @jax.jit
    def both(six: Six, dy: Any) -> Any:
        y, vjp = jax.vjp(
            lambda six: call_inference(case.form, *six, implementation=implementation, **keywords),
            six,
        )
        return y, vjp(dy)[0]

    y, gradients = jax.tree.map(np.asarray, both(six, dy))
    exact, allowance = oracle.inference(*six, relu=case.relu, **keywords)
    assert y.dtype == dy.dtype
    oracle.assert_within("y", y, exact, allowance)

    x, _, scale, _, mean, var = six
    gate = y if case.relu else None
    expected = oracle.inference_backward(dy, x, gate, scale, mean, var, **layout)
    names = ("x", "z", "scale", "bias", "mean", "var")
    for name, *of_all in zip(
        names, six, gradients, expected.gradients, expected.allowances, strict=True
    ):
        for operand, gradient, exact, allowance in oracle.each_input(*of_all):
            assert (gradient is None) == (operand is None), name
            if gradient is None:
                continue
            assert gradient.dtype == operand.dtype, name
            if name not in ("x", "z"):
                allowance = allowance + oracle.rounding(exact, operand.dtype)
            oracle.assert_within(f"d{name}", gradient, exact, allowance)


@both_implementations
@settings(max_examples=20)
@given(case=cases(may_widen=True), mean_dtype=statistic_dtypes, var_dtype=statistic_dtypes)
# Some gradients of scale are subnormal in its dtype, whose roundings have a fixed size.
@example(
    case=Case(
        shape=(251, 1),
        axis=0,
        dtype="float32",
        form="dual_bn_add_relu",
        scale_dtype="float16",
        bias_dtype="float32",
        ratio=0.0,
        seed=7185612,
    ),
    mean_dtype="float32",
    var_dtype="float32",
)
def test_agrees_with_oracle(
    implementation: Implementation, case: Case, mean_dtype: str, var_dtype: str
) -> None:
    check(case, implementation, six_operands(case, mean_dtype, var_dtype))


@both_implementations
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 14, 14, 65), -1), ((4, 65, 14, 14), 1), ((1, 3), -1), ((5, 1, 7), 1)]
)
def test_shapes(
    implementation: Implementation, form: Form, shape: tuple[int, ...], axis: int
) -> None:
    case = Case(shape, axis, form=form)
    check(case, implementation, six_operands(case))


@both_implementations
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [1, -1], ids=["nchw", "nhwc"])
def test_two_inputs_of_every_dtype(implementation: Implementation, dtype: str, axis: int) -> None:
    case = Case((6, 5, 4, 7), axis, dtype, "dual_bn_add_relu")
    check(case, implementation, six_operands(case))


@both_implementations
@one_or_two_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
def test_equals_training_with_its_own_statistics(
    implementation: Implementation, form: Form, save: Save
) -> None:
    given_operands = operands(Case((4, 7, 7, 33), form=form))
    use: dict[str, Any] = {"implementation": implementation}
    result = call(form, *given_operands, save=save, **use)
    y = call_inference(form, *given_operands, result.mean, result.var, **use)
    np.testing.assert_allclose(y, result.y, rtol=1e-6, atol=1e-6)


@both_implementations
def test_default_epsilon_matters(implementation: Implementation) -> None:
    """With var = 0, only epsilon is left under the square root."""
    x, zeros = jnp.full((2, 3), 2.0, jnp.float32), jnp.zeros(3, jnp.float32)
    y = jax_bnar.batch_norm_inference(x, None, None, zeros, zeros, implementation=implementation)
    np.testing.assert_allclose(y, np.full((2, 3), 2 / np.sqrt(1e-5)), rtol=1e-6)


@both_implementations
def test_nan_statistics_stay_in_their_channel(implementation: Implementation) -> None:
    case = Case((3, 5, 9))
    x, z, scale, bias, mean, var = six_operands(case)
    use: dict[str, Any] = {"implementation": implementation}
    clean = call_inference(case.form, x, z, scale, bias, mean, var, **use)
    mean[4] = np.nan
    y = call_inference(case.form, x, z, scale, bias, mean, var, **use)
    assert np.isnan(y[..., 4]).all()
    others = np.arange(9) != 4
    np.testing.assert_array_equal(y[..., others], clean[..., others])


@both_implementations
@one_or_two_inputs
def test_vmap_over_statistics(implementation: Implementation, form: Form) -> None:
    """An ensemble has the same inputs and several sets of statistics."""
    case = Case((3, 5, 9), form=form)
    *others, mean, var = six_operands(case)
    first = mean[0] if isinstance(mean, tuple) else mean
    means = np.stack([first, first + 1, first * 2])

    def one(first: Any) -> Any:
        means = (first, *mean[1:]) if isinstance(mean, tuple) else first
        six: Any = (*others, means, var)
        return call_inference(form, *six, implementation=implementation)

    alone = jax.jit(one)
    stacked = np.stack([alone(m) for m in means])
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(means), stacked, rtol=1e-6, atol=1e-6)

    def loss(mean: Any) -> Any:
        return jnp.square(one(mean)).sum()

    gradient = jax.jit(jax.grad(loss))
    gradients = np.stack([gradient(m) for m in means])
    together = jax.jit(jax.vmap(jax.grad(loss)))(means)
    np.testing.assert_allclose(together, gradients, rtol=1e-5, atol=1e-5)


@both_implementations
@pytest.mark.parametrize("inputs", [1, 2])
def test_of_an_empty_batch(implementation: Implementation, inputs: int) -> None:
    """Nothing is undefined without statistics of the batch: y is empty, and its gradients are 0."""
    dtype = jnp.float32
    x = (jnp.ones((0, 5, 3), dtype),) * inputs
    function = jax_bnar.bn_act_inference if inputs == 1 else jax_bnar.dual_bn_act_inference
    vectors = [jnp.full(3, 2, dtype)] * (4 * inputs)

    def run(*vectors: Any) -> Any:
        return function(*x, *vectors, activation="silu", implementation=implementation)

    y, vjp = jax.vjp(run, *vectors)
    assert (y.shape, y.dtype) == ((0, 5, 3), dtype)
    for gradient in vjp(y):
        np.testing.assert_array_equal(gradient, np.zeros(3))
    no_channels = [jnp.zeros((0,), dtype)] * 2
    wide = jax_bnar.bn_relu_inference(
        jnp.ones((4, 5, 0), jnp.bfloat16), None, None, *no_channels, out_dtype=jnp.float32
    )
    assert (wide.shape, wide.dtype) == ((4, 5, 0), dtype)


def test_float64_without_x64_is_float32() -> None:
    with jax.enable_x64(False):
        x, ones = np.ones((4, 3)), jnp.ones(3)
        for y in (
            jax_bnar.bn_relu(x, None, None, out_dtype=x.dtype).y,
            jax_bnar.bn_relu_inference(x, None, None, ones, ones, out_dtype=float),
        ):
            assert y.dtype == jnp.float32
