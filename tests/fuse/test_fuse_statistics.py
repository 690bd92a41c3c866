"""Programs of which `fuse` takes only the statistics: they become `batch_statistics`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import assert_fused, assert_no_worse, kernels, operators
from jax import lax
from statistics_programs import (
    AXES,
    NAMED,
    PROGRAMS,
    SCALE,
    G,
    X,
    fast_moments,
    gate,
    gated,
    moments,
    of_a_sum_with_a_vector,
    returned,
    stopped_variance,
)

import jax_bnar


def _sums_of_arrays(jaxpr: Any) -> int:
    """How many sums a program takes of arrays as large as x; each is a pass, or part of one."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "reduce_sum" and equation.invars[0].aval.size == X.size
        inner = (p for p in equation.params.values() if hasattr(p, "jaxpr"))
        found += sum(_sums_of_arrays(closed.jaxpr) for closed in inner)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("function", **NAMED)
def test_programs(function: Callable[..., Any]) -> None:
    """One call takes the place of all sums; values and gradients are as close to float64 as before.

    The gradients are those of the program, whichever statistics it stops.
    """
    assert_fused(function, X, G, SCALE, batch_statistics=1)
    assert kernels(jax_bnar.fuse(function), X, G, SCALE) == 1
    assert _sums_of_arrays(jax.make_jaxpr(function)(X, G, SCALE).jaxpr) >= 2
    assert _sums_of_arrays(jax.make_jaxpr(jax_bnar.fuse(function))(X, G, SCALE).jaxpr) == 0
    (candidate,) = jax_bnar.explain(function)(X, G, SCALE).candidates
    reason = PROGRAMS[function]
    assert reason in candidate.reason if reason else not candidate.reason
    assert "statistics_programs.py:" in candidate.line


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("function", [gate, stopped_variance, of_a_sum_with_a_vector, returned])
def test_16_bit_types(function: Callable[..., Any], dtype: Any) -> None:
    assert_fused(function, *(a.astype(dtype) for a in (X, G, SCALE)), batch_statistics=1)


def test_statistics_in_float32_of_a_16_bit_array() -> None:
    """The kernel reads the narrow array, and the conversion is left to the rest of the program."""

    def layer(x: Any, g: Any) -> Any:
        wide = x.astype(g.dtype)
        return gated(wide, g, *fast_moments(wide))

    assert_fused(layer, X.astype(jnp.bfloat16), G, batch_statistics=1)
    (candidate,) = jax_bnar.explain(layer)(X.astype(jnp.bfloat16), G).matched
    assert candidate.dtype == "bfloat16"


@pytest.mark.parametrize("function", **NAMED)
def test_derivatives_are_exact(function: Callable[..., Any]) -> None:
    """In float64, where rounding hides nothing: values, tangents and gradients of the program."""
    arguments = tuple(a.astype(jnp.float64) for a in (X, G, SCALE))
    tangents = tuple(jnp.cos(a) for a in arguments)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(f: Callable[..., Any], arguments: Any, tangents: Any) -> Any:
        y, pullback = jax.vjp(f, *arguments)
        return jax.jvp(f, arguments, tangents), pullback(jax.tree.map(jnp.sin, y))

    results = [derivatives(f, arguments, tangents) for f in (function, jax_bnar.fuse(function))]
    for given, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-9, atol=1e-9)


def test_far_from_zero() -> None:
    """E[x^2] - E[x]^2 loses all digits of the variance here, and the kernel does not."""

    def layer(x: Any) -> Any:
        return fast_moments(x)[1].reshape(-1)

    x = X + 1e4
    exact = np.var(np.asarray(x, np.float64), AXES)
    np.testing.assert_allclose(jax.jit(jax_bnar.fuse(layer))(x), exact, rtol=1e-5)
    assert np.max(np.abs(np.asarray(jax.jit(layer)(x)) - exact) / exact) > 0.1


def test_vmap_and_loops() -> None:
    def layer(x: Any, g: Any) -> Any:
        return gate(x, g, SCALE)

    stacked = jnp.stack([X, 2 * X]), jnp.stack([G, 1 - G])
    given = jax.jit(jax.vmap(jax_bnar.fuse(layer)))(*stacked)
    np.testing.assert_allclose(given, jax.vmap(layer)(*stacked), rtol=1e-4, atol=1e-5)

    def loop(x: Any, g: Any) -> Any:
        return lax.scan(
            lambda c, _: (c + layer(c @ jnp.eye(8, dtype=c.dtype), g), None), x, None, 3
        )[0]

    assert operators(loop, X, G) == {"batch_statistics": 3}
    assert_no_worse(loop, X, G)
    remat = jax.checkpoint(layer)
    assert operators(remat, X, G) == {"batch_statistics": 1}
    assert_no_worse(remat, X, G)


def test_in_a_gradient() -> None:
    """Statistics are values, so a program may contain its own gradient, unlike a BatchNorm."""

    def loss(x: Any, g: Any) -> Any:
        return jnp.sum(jnp.square(gate(x, g, SCALE)))

    gradient = jax.grad(loss)
    assert operators(gradient, X, G) == {"batch_statistics": 1}
    assert_no_worse(gradient, X, G)

    def of_batch_norm(x: Any) -> Any:
        mean, var = moments(x)
        return jnp.sum(jnp.square(jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))))

    for around in (lambda f: f, jax.jit):
        program = jax.grad(around(of_batch_norm))
        with pytest.raises(ValueError, match=r"write jax.grad\(fuse\(loss\)\)"):
            jax_bnar.fuse(program)(X)
        report = jax_bnar.explain(program)(X)
        assert not report.matched
        assert "instead of fuse" in str(report)


def test_a_batch_norm_wins() -> None:
    """What an operator computes as a whole gives the statistics as well."""

    def watched(x: Any, g: Any, scale: Any) -> Any:
        mean, var = moments(x)
        y = (x - mean) * lax.rsqrt(var + 1e-3)
        return jax.nn.relu(y * scale), y.dtype, jnp.sqrt(var), lax.stop_gradient(mean)

    layer = lambda *args: watched(*args)[::2]  # noqa: E731 (a dtype is no array)
    assert_fused(layer, X, G, SCALE, bn_relu=1)

    def gated_after(x: Any, g: Any, scale: Any) -> Any:
        mean, var = moments(x)
        return (x - mean) * lax.rsqrt(var + 1e-3) * jax.nn.sigmoid(g)

    assert_fused(gated_after, X, G, SCALE, batch_norm=1)

    def both(x: Any, g: Any, scale: Any) -> Any:
        """The gate reads what the BatchNorm computes, which is in memory for that reason alone."""
        return gate(watched(x, g, scale)[0], g, scale)

    assert_fused(both, X, G, SCALE, bn_relu=1, batch_statistics=1)


def test_what_reads_the_statistics_does_not_matter() -> None:
    def printed(x: Any) -> Any:
        jax.debug.print("{}", x.var(AXES))
        return x

    assert operators(printed, X) == {"batch_statistics": 1}

    def given_to_another(x: Any, g: Any) -> Any:
        """The variance of one array is a part of another's scale."""
        mean, var = moments(g)
        return jax.nn.relu((g - mean) * lax.rsqrt(var + 1e-3) * x.var(AXES, keepdims=True))

    assert_fused(given_to_another, X, G, batch_statistics=1, bn_relu=1)
