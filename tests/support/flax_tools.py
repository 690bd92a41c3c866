"""Shared by the tests of the Flax layers."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SHAPE = (6, 4, 5, 3)


@contextlib.contextmanager
def as_flax_needs_it() -> Iterator[None]:
    """Allows implicit promotion, which Flax's layer needs and which is an error in our tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def normal(seed: int, shape: tuple[int, ...] = SHAPE, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * 2 + 3
    return jnp.asarray(values, dtype)


def tolerance(*dtypes: Any) -> float:
    """A few roundings of the coarsest dtype involved."""
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(
        16 * float(jnp.finfo(jnp.float32).eps), *(2 * float(jnp.finfo(d).eps) for d in floats), 0.0
    )


def assert_close(actual: Any, expected: Any, rtol: float) -> None:
    """Asserts equal structure, dtypes and shapes, and leaves that differ by at most rtol."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        magnitude = max(1.0, float(np.max(np.abs(e), initial=0, where=np.isfinite(e))))
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * magnitude)


def shapes_and_dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def init(layer: Any, x: jax.Array, **call: Any) -> Any:
    return jax.jit(functools.partial(layer.init, **call))(jax.random.key(1), x)


def apply(layer: Any, variables: Any, x: jax.Array, *call: Any, **named: Any) -> Any:
    return layer.apply(variables, x, *call, **named)


@functools.partial(jax.jit, static_argnums=0)
def trained(layer: Any, variables: Any, x: jax.Array, **call: Any) -> tuple[jax.Array, Any]:
    return layer.apply(variables, x, use_running_average=False, mutable=["batch_stats"], **call)


@functools.partial(jax.jit, static_argnums=0)
def evaluated(layer: Any, variables: Any, x: jax.Array, **call: Any) -> jax.Array:
    return layer.apply(variables, x, use_running_average=True, **call)


def some_variables(layer: Any, x: jax.Array, seed: int = 7) -> Any:
    """Variables with the layer's tree, and values that differ from the initial ones."""
    tree = jax.eval_shape(
        functools.partial(layer.init, use_running_average=False), jax.random.key(0), x
    )
    leaves, structure = jax.tree.flatten(tree)
    generator = np.random.default_rng(seed)
    values = [jnp.asarray(generator.uniform(0.5, 2.0, v.shape), v.dtype) for v in leaves]
    return jax.tree.unflatten(structure, values)


def trained_looking(tree: Any, seed: int = 5) -> Any:
    """Values for a tree of shapes and dtypes, like those of a network in training.

    This is much cheaper than a network's `init`, whose random numbers take seconds to compile.
    """
    generator = np.random.default_rng(seed)

    def value(path: Any, leaf: Any) -> jax.Array:
        kind = jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-1]
        if kind in ("scale", "var"):
            values = generator.uniform(0.5, 1.5, leaf.shape)
        else:
            fan_in = np.prod(leaf.shape[:-1]) if kind == "kernel" else 1
            values = generator.normal(size=leaf.shape) / np.sqrt(fan_in)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, tree)


def trained_model(make: Any) -> Any:
    """The NNX model `make(rngs=...)` with values like those of a network in training."""
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    nnx.update(model, trained_looking(nnx.to_pure_dict(nnx.state(model))))
    return model
