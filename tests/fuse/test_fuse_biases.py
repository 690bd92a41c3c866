"""Vectors that BatchNorm removes, or that become part of its bias."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_operands import AXES, BIAS, SCALE, X, Z, batch_norm, normalise, vector
from fuse_tools import array, assert_fused

import jax_bnar


def _with_bias(x: Any, kernel: Any, shift: Any, scale: Any, bias: Any, old: Any) -> Any:
    """A convolution as in Keras or stax, with a bias that BatchNorm removes again."""
    x = jnp.einsum("nhwc,cd->nhwd", x, kernel) + vector(shift)
    mean, var = x.mean(AXES), x.var(AXES)
    y = jax.nn.relu(normalise(x, mean, var, scale, bias))
    return y, 0.9 * old + 0.1 * mean, 0.9 * old + 0.1 * var, (x * x).mean(AXES)


def test_bias_before_the_norm() -> None:
    """The bias cancels, so the array with the bias is not computed; only the mean contains it."""
    arguments = (X, jnp.outer(SCALE, BIAS), 3 * BIAS, SCALE, BIAS, SCALE)
    assert_fused(_with_bias, *arguments, bn_relu=1)
    equations = jax.make_jaxpr(jax_bnar.fuse(_with_bias))(*arguments).jaxpr.eqns
    whole = [e.primitive.name for e in equations if e.outvars[0].aval.shape == X.shape]
    assert whole == ["dot_general", "custom_jvp_call"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bias_before_the_norm_that_is_not_finite(value: float) -> None:
    arguments = (X, jnp.outer(SCALE, BIAS), BIAS.at[1].set(value), SCALE, BIAS, SCALE)
    expected = jax.jit(_with_bias)(*arguments)
    given = jax.jit(jax_bnar.fuse(_with_bias))(*arguments)
    for a, b in zip(given, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_bias_before_the_norm_that_is_read_elsewhere() -> None:
    """The array with the bias exists anyway, so it is normalised as it is."""

    def layer(x: Any, shift: Any, scale: Any, bias: Any) -> Any:
        x = x + vector(shift)
        return jax.nn.relu(batch_norm(x, scale, bias)), jnp.sin(x)

    assert_fused(layer, X, BIAS, SCALE, BIAS, bn_relu=1)

    def example(x: Any, shift: Any, scale: Any, bias: Any) -> Any:
        """The shift is not a vector over the channels, so it does not cancel."""
        return jax.nn.relu(batch_norm(x + shift, scale, bias))

    assert_fused(example, X, X[:, :1, :1], SCALE, BIAS, bn_relu=1)


def test_bias_before_both_norms_of_a_join() -> None:
    def join(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        first, second = x + vector(bias), z + vector(scale)
        means = first.mean(AXES), second.mean(AXES)
        return jax.nn.relu(batch_norm(first, scale, bias) + batch_norm(second, bias, scale)), means

    assert_fused(join, X, Z, SCALE, BIAS, dual_bn_add_relu=1)


@pytest.mark.parametrize("end", ["residual", "gate", "repeated", "returned"])
def test_the_report_has_one_line_for_a_norm_after_a_bias(end: str) -> None:
    """What is computed from the norm is no normalisation of its own, refused for another reason."""

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x + 3 * vector(bias), scale, bias)
        ends = {
            "residual": lambda: jax.nn.relu(z + y),
            "gate": lambda: y * jax.nn.sigmoid(z),
            "repeated": lambda: y + jnp.repeat(y, 2, 1)[:, : y.shape[1]],
            "returned": lambda: (y, jax.nn.relu(y)),
        }
        return ends[end]()

    report = jax_bnar.explain(function)(X, Z, SCALE, BIAS)
    assert (len(report.matched), report.refused) == (1, ())


def test_bias_before_the_norm_of_evaluation() -> None:
    def given(x: Any, shift: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        return jax.nn.relu(normalise(x + vector(shift), mean, var, scale, bias))

    arguments = (X, SCALE, SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_fused(given, *arguments, bn_relu_inference=1)
    equations = jax.make_jaxpr(jax_bnar.fuse(given))(*arguments).jaxpr.eqns
    assert sum(e.outvars[0].aval.shape == X.shape for e in equations) == 1


def test_what_the_bias_of_evaluation_makes_is_a_shortcut_too() -> None:
    """A convolution with a bias before the first block of a ResNet v2."""

    def given(x: Any, shift: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        stem = x + vector(shift)
        return jnp.sin(jax.nn.relu(normalise(stem, mean, var, scale, bias))) + stem

    arguments = (X, SCALE, SCALE, BIAS, BIAS, jnp.abs(SCALE))
    assert_fused(given, *arguments, bn_relu_inference=1)


def test_a_residual_of_one_vector_is_part_of_the_bias() -> None:
    """The kernel's residual must be a whole array, but a vector over channels joins the bias."""

    def layer(x: Any, vector: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.relu(batch_norm(x, scale, bias) + vector)

    assert_fused(layer, X, array((1, 1, 1, 3), 4), SCALE, BIAS, bn_relu=1)
    infinite = array((1, 1, 1, 3), 4).at[..., 1].set(np.inf)
    assert_fused(layer, X, infinite, SCALE, BIAS, bn_relu=1)
