"""The linear primitive with a map that communicates, as synchronised statistics do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bnar._autodiff.linear_call import linear_call

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class _Centre:
    """(r, t) -> r*(t - mean of t over everything, including other devices)."""

    axis_name: str | None

    def sees(self, axis_name: Any) -> bool:
        return axis_name == self.axis_name

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool]:
        del axis_name
        return (any(jax.tree.leaves((residuals, tangents))),)

    def tangent(self, residuals: Any, tangents: Any) -> Any:
        (r,), (t,) = residuals, tangents
        mean = t.mean()
        return (r * (t - (jax.lax.pmean(mean, self.axis_name) if self.axis_name else mean)),)

    def transpose(self, residuals: Any, cotangents: Any) -> Any:
        (r,), (ct,) = residuals, cotangents
        mean = (r * ct).mean()
        return (r * ct - (jax.lax.pmean(mean, self.axis_name) if self.axis_name else mean),)


def _centre(axis_name: str | None) -> Any:
    @jax.custom_jvp
    def function(x: Any) -> Any:
        mean = x.mean()
        return x * (x - (jax.lax.pmean(mean, axis_name) if axis_name else mean))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (x_dot,) = primals, tangents
        y = function(x)
        mean = x.mean()
        centred = x - (jax.lax.pmean(mean, axis_name) if axis_name else mean)
        (moved,) = linear_call(_Centre(axis_name), (x,), (x_dot,), (y,))
        return y, centred * x_dot + moved

    return function


def _in_one_piece(x: Any) -> Any:
    return x * (x - x.mean())


def test_collectives_under_vmap() -> None:
    """grad(vmap), jvp(vmap) and a Hessian, where the mapped axis is named in the map."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)))

    def mapped(x: Any) -> Any:
        return jax.vmap(_centre("devices"), axis_name="devices")(x)

    def loss(function: Any) -> Any:
        return lambda x: (function(x) ** 2).sum()

    np.testing.assert_allclose(mapped(x), _in_one_piece(x), rtol=1e-12)
    for derivative in (jax.grad, jax.jacfwd, jax.hessian):
        actual = jax.jit(derivative(loss(mapped)))(x)
        np.testing.assert_allclose(actual, derivative(loss(_in_one_piece))(x), rtol=1e-9, atol=1e-9)


def test_nested_vmap() -> None:
    """Nested maps, with and without an axis name, over the first and the last dimension."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4, 2)))

    def outer(function: Any) -> Any:
        return jax.vmap(lambda x: (function(x) ** 2).sum(), -1)

    inner = jax.vmap(_centre("devices"), axis_name="devices")
    actual = jax.jit(jax.grad(lambda x: outer(inner)(x).sum()))(x)
    expected = jax.grad(lambda x: outer(_in_one_piece)(x).sum())(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_shared_residual_and_shared_tangent() -> None:
    """The cotangent of an operand that the examples share is a sum over them."""
    rs = jnp.arange(1.0, 7.0).reshape(3, 2)
    t = jnp.array([0.5, -1.0])

    def shared_tangent(t: Any) -> Any:
        return jax.vmap(lambda r: linear_call(_Centre(None), (r,), (t,), (t,))[0])(rs)

    def shared_residual(ts: Any) -> Any:
        return jax.vmap(lambda t_: linear_call(_Centre(None), (t,), (t_,), (t_,))[0])(ts)

    def expected(r: Any, t: Any) -> Any:
        return r * (t - t.mean(-1, keepdims=True))

    for function, plain, point in (
        (shared_tangent, lambda t: expected(rs, jnp.broadcast_to(t, rs.shape)), t),
        (shared_residual, lambda ts: expected(jnp.broadcast_to(t, ts.shape), ts), rs),
    ):
        np.testing.assert_allclose(function(point), plain(point), rtol=1e-12)
        actual = jax.linear_transpose(function, point)(rs)[0]
        np.testing.assert_allclose(actual, jax.vjp(plain, point)[1](rs)[0], rtol=1e-12)
