"""Shared by the JAX peers: operands on the device, results back on the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sites.peers import Step
from benchmarks.sites.problem import Problem, Results


def activation(values: np.ndarray | None, problem: Problem) -> jax.Array | None:
    """x, z or dy in the problem's dtype, in memory that JAX owns."""
    return None if values is None else jnp.array(values, problem.dtype, copy=True)


def parameter(values: np.ndarray) -> jax.Array:
    return jnp.array(values, jnp.float32, copy=True)


def make_step(
    function: Callable[..., Any], operands: tuple[Any, ...], to_results: Callable[[Any], Results]
) -> Step:
    """Compiles the step. The operands are arguments, so that XLA cannot constant-fold them."""
    compiled = jax.jit(function).lower(*operands).compile()
    return Step(lambda: jax.block_until_ready(compiled(*operands)), to_results)


def to_numpy(values: jax.Array) -> np.ndarray:
    return np.asarray(values).astype(np.float32)
