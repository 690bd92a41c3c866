"""Every construct of JAX goes through `fuse` unharmed, with every body rebuilt, match or not.

Bodies are usually rebuilt only where something in them is fused. Here all of them are, so that a
construct which the rewriting would break cannot hide behind a program that has nothing to fuse.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_bnar
from jax_bnar._fuse.plan import Plan

pytestmark = pytest.mark.slow

X = array((6, 4))
MESH = Mesh(np.array(jax.devices()[:2]), ("data",))


def _join(x: jax.Array) -> jax.Array:
    y = (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True) + 1e-3)
    return jax.nn.relu(y + x)


def _plain(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2 + (jnp.arange(4) & ~jnp.int64(1)).astype(x.dtype)[None]


@jax.custom_vjp
def _with_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (3 * dy * x,))


@jax.custom_jvp
def _with_jvp(x: jax.Array) -> jax.Array:
    return jnp.cos(x)


_with_jvp.defjvp(lambda p, t: (jnp.cos(*p), 5 * t[0]))


def _ref(f: Any, x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] += f(x)
    lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(i, x[i]), None)
    return ref[...]


def _callback(f: Any, x: Any) -> Any:
    given = jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    jax.debug.callback(lambda value: None, x[0, 0])
    return f(given)


def _random(f: Any, x: Any) -> Any:
    def step(key: Any, _: Any) -> Any:
        key, use = jax.random.split(key)
        return key, f(x + jax.random.normal(use, x.shape, x.dtype))

    return lax.scan(step, jax.random.key(3), length=3)[1]


def _shard_map(f: Any, x: Any, check_vma: bool) -> Any:
    def local(x: Any) -> Any:
        return lax.scan(lambda c, _: (f(c), lax.pmean(c, "data")), x, length=2)

    return jax.shard_map(
        local, mesh=MESH, in_specs=P("data"), out_specs=(P("data"), P()), check_vma=check_vma
    )(x)


def _weak_carry(f: Any, x: Any) -> Any:
    return lax.scan(lambda c, _: (c * 2, f(x) * c), 1.0, length=3)


# Each takes the function that a body computes, and x.
CONSTRUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda f, x: jax.jit(lambda x: jnp.tanh(f(x)) @ x.T)(x),
    "jit with donation": lambda f, x: jax.jit(f, donate_argnums=0)(x + 1),
    "nested jits": lambda f, x: jax.jit(lambda x: jax.jit(lambda x: jnp.exp(f(x)) @ x.T)(x) + 1)(x),
    "scan": lambda f, x: lax.scan(
        lambda c, y: (f(c + y), c.sum()), x, jnp.arange(3.0, dtype=x.dtype)
    ),
    "scan backwards": lambda f, x: lax.scan(
        lambda c, _: (f(c), c), x, length=3, reverse=True, unroll=2
    ),
    "scan with a weak carry": _weak_carry,
    "while_loop": lambda f, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x)
    ),
    "fori_loop": lambda f, x: lax.fori_loop(0, 3, lambda i, c: f(c) + i, x),
    "cond": lambda f, x: lax.cond(x.sum() > 0, f, jnp.negative, x),
    "switch": lambda f, x: lax.switch(jnp.int32(7), [jnp.sin, jnp.cos, f], x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "checkpoint with a policy": lambda f, x: jax.checkpoint(
        lambda x: f(jnp.sin(x)) @ x.T, policy=jax.checkpoint_policies.dots_saveable
    )(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "associative_scan": lambda f, x: lax.associative_scan(jnp.add, f(x)),
    "map": lambda f, x: lax.map(f, jnp.stack([x, x + 1]), batch_size=1),
    "custom_vjp": lambda f, x: f(_with_vjp(x)),
    "custom_jvp": lambda f, x: f(_with_jvp(x)),
    "custom_root": lambda f, x: (
        lax.custom_root(
            lambda y: y * y * y - x.sum(),
            jnp.ones((), x.dtype),
            lambda g, y: lax.fori_loop(0, 9, lambda _, y: y - g(y) / (3 * y * y), y),
            lambda g, y: y / g(jnp.ones_like(y)),
        )
        + f(x)
    ),
    "linear solve": lambda f, x: jnp.linalg.solve(x.T @ x + jnp.eye(4, dtype=x.dtype), f(x).T),
    "gradient of something else": lambda f, x: f(x) + jax.grad(lambda a: jnp.sin(a).sum())(x),
    "optimization_barrier": lambda f, x: lax.optimization_barrier((f(x), x)),
    "refs": _ref,
    "callbacks": _callback,
    "random numbers": _random,
    "shard_map": functools.partial(_shard_map, check_vma=True),
    "shard_map unchecked": functools.partial(_shard_map, check_vma=False),
}


@pytest.fixture(autouse=True)
def _rebuild_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "changes", property(lambda self: True))


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_without_a_match(name: str) -> None:
    program = functools.partial(CONSTRUCTS[name], _plain)
    expected, given = jax.jit(program)(X), jax.jit(jax_bnar.fuse(program))(X)
    _assert_alike(given, expected, rtol=0.0)
    eager = jax_bnar.fuse(program)(X)
    _assert_alike(eager, program(X), rtol=1e-6)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_with_a_match(name: str) -> None:
    program = functools.partial(CONSTRUCTS[name], _join)
    _assert_alike(jax.jit(jax_bnar.fuse(program))(X), jax.jit(program)(X), rtol=1e-3)


@pytest.mark.parametrize("name", sorted({*CONSTRUCTS} - {"while_loop", "callbacks", "refs"}))
def test_gradients(name: str) -> None:
    program = functools.partial(CONSTRUCTS[name], _plain)

    def gradient(f: Any) -> Any:
        def loss(x: Any) -> Any:
            leaves = jax.tree.leaves(f(x))
            return sum(jnp.sum(leaf.astype(x.dtype) ** 2) for leaf in leaves)

        return jax.jit(jax.grad(loss))

    _assert_alike(gradient(jax_bnar.fuse(program))(X), gradient(program)(X), rtol=1e-5)


def _assert_alike(given: Any, expected: Any, rtol: float) -> None:
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert (jax.typeof(a), a.sharding.is_equivalent_to(b.sharding, b.ndim)) == (
            jax.typeof(b),
            True,
        )
        np.testing.assert_allclose(a, b, rtol=rtol, atol=10 * rtol)
