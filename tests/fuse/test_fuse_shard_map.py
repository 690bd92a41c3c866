"""`fuse` outside of a `shard_map` whose loops, branches or jitted blocks communicate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, kernels, operators
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_bnar

X = array((8, 4))


def _join(x: Any) -> jax.Array:
    """A synchronised BatchNorm, the addition of its input and a ReLU."""
    mean = lax.pmean(x.mean(0, keepdims=True), "data")
    squares = lax.pmean(jnp.square(x).mean(0, keepdims=True), "data")
    return jax.nn.relu((x - mean) * lax.rsqrt(squares - mean * mean + 1e-3) + x)


@jax.jit
def _block(x: jax.Array) -> jax.Array:
    return jnp.sin(_join(x)) @ jnp.eye(4, dtype=x.dtype)


def _while(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, _join(c[1])), (0, x))[1]


BODIES = {
    "scan": lambda x: lax.scan(lambda c, _: (_join(c), None), x, length=3)[0],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda _, c: _join(c), x),
    "while_loop": _while,
    "cond": lambda x: lax.cond(lax.psum(x.sum(), "data") > 0, _join, lambda c: c - 1, x),
    "jitted block": _block,
    "checkpoint": jax.checkpoint(_join),
    "scan of jitted blocks": lambda x: lax.scan(lambda c, _: (_block(c), None), x, length=3)[0],
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_bodies_that_communicate(name: str, check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(
        BODIES[name], mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    assert operators(program, X) in ({"bn_add_relu": 1}, {"bn_add_relu": 3})
    fused = jax_bnar.fuse(program)
    assert kernels(fused, X) == 1
    np.testing.assert_allclose(jax.jit(fused)(X), jax.jit(program)(X), rtol=1e-4, atol=1e-5)
    if name == "while_loop":
        return  # It has no reverse mode.

    def gradient(f: Any) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))

    np.testing.assert_allclose(gradient(fused)(X), gradient(program)(X), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("names", [("b", "a", "c"), ("model", "data", "x"), ("j", "i", "k")])
def test_the_order_of_names_is_that_of_the_mesh(names: tuple[str, ...]) -> None:
    """The order of a set differs between processes, and with it the program and its rounding."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), names)

    def block(x: Any) -> jax.Array:
        mean = lax.pmean(x.mean(0, keepdims=True), names)
        squares = lax.pmean(jnp.square(x).mean(0, keepdims=True), names)
        return jax.nn.relu((x - mean) * lax.rsqrt(squares - mean * mean + 1e-3))

    program = jax.shard_map(block, mesh=mesh, in_specs=P(names), out_specs=P(names))
    assert f"names={names}" in str(jax.make_jaxpr(jax_bnar.fuse(program))(X))
