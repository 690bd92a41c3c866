"""Shared by the JAX peers: operands on the device, results back on the host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sites.peers import Step
from benchmarks.sites.problem import Problem, Results


def activation(values: np.ndarray | None, problem: Problem) -> jax.Array | None:
    """x, z or dy in the problem's dtype and layout, in memory that JAX owns."""
    if values is None:
        return None
    return jnp.array(problem.in_layout(values), problem.dtype, copy=True)


def parameter(values: np.ndarray) -> jax.Array:
    return jnp.array(values, jnp.float32, copy=True)


def make_step(
    step: Callable[..., Any],
    forward: Callable[..., Any],
    operands: tuple[Any, ...],
    to_results: Callable[[Any], Results],
) -> Step:
    """Compiles both functions. The operands are arguments, so that XLA cannot constant-fold them.

    `forward` takes the operands of `step` without the last one, dy.
    """
    compiled = jax.jit(step).lower(*operands).compile()

    @functools.cache  # compiled on first use, because most benchmarks never call it
    def compiled_forward() -> Any:
        return jax.jit(forward).lower(*operands[:-1]).compile()

    return Step(
        run=lambda: jax.block_until_ready(compiled(*operands)),
        forward=lambda: jax.block_until_ready(compiled_forward()(*operands[:-1])),
        to_results=to_results,
    )


def to_numpy(outputs: Any, problem: Problem) -> Any:
    """The arrays of a tree, as check_results wants them."""
    return jax.tree.map(
        lambda each: problem.from_layout(np.asarray(each).astype(np.float32)), outputs
    )
