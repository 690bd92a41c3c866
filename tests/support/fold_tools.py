"""Checks of folded networks: their results, and that nothing of a BatchNorm runs each time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuse_tools import error, in_float64
from jax import lax

import jax_bnar

# Rows, and the variables of a product with a BatchNorm.
X = jax.random.normal(jax.random.key(0), (3, 4), jnp.float32)
W = {
    "kernel": jax.random.normal(jax.random.key(1), (4, 6), jnp.float32),
    "mean": jax.random.normal(jax.random.key(2), (6,), jnp.float32),
    "var": jnp.full((6,), 2.0, jnp.float32),
    "rows": jax.random.normal(jax.random.key(3), (3, 1), jnp.float32),
}


def norm(y: jax.Array, w: Any) -> jax.Array:
    """A BatchNorm of rows of 6, by the statistics in w."""
    return (y - w["mean"].reshape(1, 6)) * lax.rsqrt(w["var"].reshape(1, 6) + 1e-3)


def folded(fun: Callable[..., Any], variables: Any, *args: Any) -> jax_bnar.FoldedNetwork:
    """The folded network, after a check that its results are as close to float64 as before."""
    network = jax_bnar.fold_batch_norms(fun, variables, *args)
    assert_no_worse(network, fun, variables, *args)
    return network


def assert_no_worse(
    network: jax_bnar.FoldedNetwork, fun: Callable[..., Any], variables: Any, *args: Any
) -> None:
    exact = jax.tree.leaves(jax.jit(fun)(*in_float64((variables, *args))))
    before = jax.jit(fun)(variables, *args)
    after = jax.jit(network.apply)(network.variables, *args)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    leaves = zip(jax.tree.leaves(after), jax.tree.leaves(before), exact, strict=True)
    for ours, theirs, oracle in leaves:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        size = 1 + float(np.max(np.abs(oracle)))
        slack = 8 * float(jnp.finfo(ours.dtype).eps)
        assert error(ours, oracle) / size <= 1.5 * error(theirs, oracle) / size + slack


def runs_each_time(network: jax_bnar.FoldedNetwork, *args: Any) -> set[str]:
    """The names of the primitives that the folded network runs in each call."""
    closed: Any = jax.make_jaxpr(network.apply)(network.variables, *args)
    return {equation.primitive.name for equation in closed.eqns}


def assert_refused(net: Callable[..., Any], variables: Any, x: jax.Array, reason: str) -> None:
    """Nothing is folded, the report says why, and the network computes what it did."""
    network = jax_bnar.fold_batch_norms(net, variables, x)
    assert not network.report.folded, network.report
    (refused, *_) = network.report.refused
    assert reason in refused.reason
    assert refused.reason in str(network.report)
    assert ".py:" in refused.line
    before, after = jax.jit(net)(variables, x), jax.jit(network.apply)(network.variables, x)
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        # XLA may round the two programs differently: one reads what the other computes first.
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
