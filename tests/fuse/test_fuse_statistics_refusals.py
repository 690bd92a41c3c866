"""Statistics that `fuse` leaves alone, and what its report says of those that it takes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fuse_tools import assert_no_worse, assert_untouched, operators
from jax import lax
from statistics_programs import (
    AXES,
    SCALE,
    SIZE,
    G,
    X,
    deviation,
    gate,
    gate_by_fast_statistics,
    moments,
    stopped,
)

import jax_bnar


def mean_alone(x: Any) -> Any:
    return x - x.mean(AXES, keepdims=True)


def mean_of_squares_alone(x: Any) -> Any:
    return x * lax.rsqrt(jnp.square(x).mean(AXES, keepdims=True) + 1e-3)


def variance_that_nothing_reads(x: Any) -> Any:
    x.var(AXES)
    return x - x.mean(AXES, keepdims=True)


def of_each_example(x: Any) -> Any:
    return x.var((1, 2)), x.var(-1)


def of_everything(x: Any) -> Any:
    return x.var()


def in_a_wider_type(x: Any) -> Any:
    wide = x.astype(jnp.float64)
    return wide.mean(AXES), wide.var(AXES)


def of_another_centre(x: Any) -> Any:
    return jnp.mean(jnp.square(x - x.mean((0, 1, 2, 3), keepdims=True)), AXES)


def around_a_stopped_mean(x: Any) -> Any:
    return jnp.mean(jnp.square(x - lax.stop_gradient(x.mean(AXES, keepdims=True))), AXES)


def masked(x: Any) -> Any:
    return jnp.where(x > 0, x, 0).var(AXES, where=x > 0)


def higher_moments(x: Any) -> Any:
    return jnp.mean((x - x.mean(AXES, keepdims=True)) ** 3, AXES)


@pytest.mark.parametrize(
    "function",
    [
        mean_alone,
        mean_of_squares_alone,
        variance_that_nothing_reads,
        of_each_example,
        of_everything,
        in_a_wider_type,
        of_another_centre,
        around_a_stopped_mean,
        masked,
        higher_moments,
    ],
    ids=lambda f: f.__name__,
)
def test_lookalikes(function: Callable[..., Any]) -> None:
    assert_untouched(function, X)


IN_PASSING: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "mul": lambda x: 2 * x,
    "add": lambda x: x + 1,
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "exp": lambda x: lax.stop_gradient(jnp.exp(x)).reshape(-1, 8),
}


@pytest.mark.parametrize("name", IN_PASSING)
def test_arrays_that_are_nowhere_in_memory(name: str) -> None:
    """XLA computes such an array where it is read; an operator would have it written first."""

    def layer(x: Any) -> Any:
        a = IN_PASSING[name](x)
        return a.var(tuple(range(a.ndim - 1)))

    assert_untouched(layer, X, reason=f"XLA computes x ({name}) in the loop that sums it")


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x @ jnp.eye(8, dtype=x.dtype),
        lambda x: lax.conv_general_dilated(
            x,
            jnp.ones((3, 3, 8, 8), x.dtype),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        lambda x: x + x[::-1],
        lambda x: jax_bnar.batch_norm(x, None, None).y,
    ],
    ids=["matrix product", "convolution", "join", "operator"],
)
def test_arrays_in_memory(before: Callable[[Any], Any]) -> None:
    layer = lambda x: before(x).var(AXES)  # noqa: E731
    assert operators(layer, X) == {"batch_statistics": 1}
    assert_no_worse(layer, X)


def test_small_arrays() -> None:
    small = X[:4], G[:4], SCALE
    assert_untouched(gate, *small, reason="x has only 2048 elements")
    assert_untouched(stopped, *small, reason="stop_gradient is applied")
    report = jax_bnar.explain(deviation)(*small)
    assert str(report).splitlines()[0] == "nothing to fuse"


def test_bytes_saved() -> None:
    """One read of x, where the program takes the variance around the mean; else none."""
    report = jax_bnar.explain(gate)(X, G, SCALE)
    assert report.bytes_saved == SIZE
    assert str(report).startswith("(no module): batch_statistics (")
    assert jax_bnar.explain(gate_by_fast_statistics)(X, G, SCALE).bytes_saved == 0
    assert "batch_statistics" in report.summary()
    assert "batch_statistics" in report.html()
    assert "pd_op" not in report.graphs()  # Paddle's pass has no such pattern


def test_each_place_has_one_line() -> None:
    """Another normalisation of the same array keeps its own reason."""

    def layer(x: Any, g: Any) -> Any:
        mean, var = moments(x, 3)
        with jax.named_scope("gate"):
            y = gate(x, g, SCALE)
        return y, (x - mean) * lax.rsqrt(var + 1e-3)

    by_module = {c.operator: c for c in jax_bnar.explain(layer)(X, G).candidates}
    assert set(by_module) == {"batch_statistics", None}
    assert by_module["batch_statistics"].module.startswith("gate")
    assert "LayerNorm" in by_module[None].reason
    assert "LayerNorm" not in by_module["batch_statistics"].reason


@pytest.mark.parametrize("clamped", [False, True])
def test_a_variance_that_is_mixed_with_another_is_not_called_evaluation(clamped: bool) -> None:
    def mixed(x: Any, kept: Any) -> Any:
        mean = x.mean(AXES, keepdims=True)
        var = jnp.square(x).mean(AXES, keepdims=True) - jnp.square(mean)
        var = jnp.maximum(var, 0) if clamped else var
        return (x - mean / 2) * lax.rsqrt(kept + var / 2 + 1e-5)

    kept = X[:1, :1, :1] ** 2
    assert "or the variance is not that of x alone" in str(jax_bnar.explain(mixed)(X, kept))
