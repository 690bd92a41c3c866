"""Operands of the programs that the tests of `fuse` rewrite, and a plain BatchNorm of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from fuse_tools import array
from jax import lax

X = array((6, 5, 4, 3))
Z = array((6, 5, 4, 3), 1)
SCALE = array((3,), 2)
BIAS = array((3,), 3)
AXES = (0, 1, 2)


# The channels are last.
def vector(v: jax.Array) -> jax.Array:
    return v.reshape(1, 1, 1, -1)


def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.mean(x, AXES), jnp.var(x, AXES)


def normalise(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> jax.Array:
    xhat = (x - vector(mean)) * lax.rsqrt(vector(var) + 1e-3)
    return xhat * vector(scale) + vector(bias)


class Programs(NamedTuple):
    """What follows a norm."""

    relu_of: Callable[[Any, Any, Any], jax.Array]
    join: Callable[[Any, Any, Any, Any], jax.Array]
    dual_join: Callable[[Any, Any, Any, Any], jax.Array]


def programs_of(norm: Callable[[Any, Any, Any], jax.Array]) -> Programs:
    """The programs of a norm, which is a function of x, scale and bias."""

    def relu_of(x: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(norm(x, scale, bias))

    def join(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(norm(x, scale, bias) + z)

    def dual_join(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        return jax.nn.relu(norm(x, scale, bias) + norm(z, bias, scale))

    return Programs(relu_of, join, dual_join)


def batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return normalise(x, *moments(x), scale, bias)
