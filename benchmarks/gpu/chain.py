"""Runs a step on several sets of operands in one program of JAX, and times it.

A small step takes less time than the host needs to launch it. So a program contains a step for each
of several sets of operands, and the host launches the next program while the device works on the
last. Together the sets are several times as large as L2, so that each of them comes from memory.

A sample is the wall-clock time of several programs, divided by the number of steps in them. The
host's share is the part of this time in which the host was still launching; if it is near 1, the
sample may have timed the host. XLA may replay a program as a CUDA graph, for all peers alike.
Barriers tie the operands of a step to the results of the previous one, so that XLA does not merge
the steps of two sets, and all results are returned, so that none is optimised away.
"""

import functools
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp


def chain(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of (sets, *constants) that calls step(*set, *constants) for each set."""

    def run(sets: Any, *constants: Any) -> Any:
        results = []
        for operands in sets:
            if results:
                # XLA removes from a barrier what is not used after it.
                (operands, constants), results[-1] = jax.lax.optimization_barrier(
                    ((operands, constants), results[-1])
                )
            results.append(step(*operands, *constants))
        return results

    return run


def make_operands(shapes: Any) -> Any:
    """Makes arrays of random numbers, of these shapes, on the device."""

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def normal(seed: Any, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)

    leaves, tree = jax.tree.flatten(shapes)
    arrays = [normal(seed, leaf.shape, leaf.dtype) for seed, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, arrays)


def measure(
    compiled: Any, operands: tuple[Any, ...], samples: int, sets: int, rounds: int
) -> tuple[list[float], float]:
    """Returns the milliseconds of a step in each sample, and the host's share."""
    jax.block_until_ready(compiled(*operands))
    times, shares = [], []
    for _ in range(samples):
        jax.block_until_ready(compiled(*operands))
        results = None
        start = perf_counter()
        for _ in range(rounds):
            # Once this is enqueued, the previous results are freed, for the next ones to use.
            results = compiled(*operands)
        asked = perf_counter() - start
        jax.block_until_ready(results)
        seconds = perf_counter() - start
        times.append(seconds * 1e3 / (rounds * sets))
        shares.append(asked / seconds)
    return times, median(shares)


@jax.jit
def relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the relative error in the L2 norm."""
    wide = expected.astype(jnp.float32)
    error = jnp.linalg.norm((got.astype(jnp.float32) - wide).ravel())
    return error / jnp.linalg.norm(wide.ravel())
