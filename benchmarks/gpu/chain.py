"""A step on several sets of operands in one program of JAX, and how long it takes.

A small step takes less than the host needs to ask for one, so a program holds a step for each of
several sets of operands (together several times the L2, so that each set comes from memory), and
the host, which does not wait, asks for the next program while the device is busy with the last. A
sample is the wall-clock time of enough programs, over all their steps; the host's share is the part
of it after which the host had asked for everything: near 1 it may be the host that was timed. XLA
may replay a program as a CUDA graph, for all peers alike. Barriers tie the operands of a step to
the results of the one before, so that XLA does not merge those of two sets, and all results are
returned, so that none is optimised away.
"""

import functools
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp


def chain(step: Callable[..., Any]) -> Callable[..., Any]:
    """(sets, *constants) to the results of step(*set, *constants), one after the other."""

    def run(sets: Any, *constants: Any) -> Any:
        results = []
        for operands in sets:
            if results:
                # XLA drops from a barrier what is not used behind it.
                (operands, constants), results[-1] = jax.lax.optimization_barrier(
                    ((operands, constants), results[-1])
                )
            results.append(step(*operands, *constants))
        return results

    return run


def make_operands(shapes: Any) -> Any:
    """Random numbers in arrays of these shapes, made on the device."""

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def normal(seed: Any, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)

    leaves, tree = jax.tree.flatten(shapes)
    arrays = [normal(seed, leaf.shape, leaf.dtype) for seed, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, arrays)


def measure(
    compiled: Any, operands: tuple[Any, ...], samples: int, sets: int, rounds: int
) -> tuple[list[float], float]:
    """Milliseconds of a step, and the host's share."""
    jax.block_until_ready(compiled(*operands))
    times, shares = [], []
    for _ in range(samples):
        jax.block_until_ready(compiled(*operands))
        results = None
        start = perf_counter()
        for _ in range(rounds):
            # The one before is freed once this is enqueued, and its memory used for the next.
            results = compiled(*operands)
        asked = perf_counter() - start
        jax.block_until_ready(results)
        seconds = perf_counter() - start
        times.append(seconds * 1e3 / (rounds * sets))
        shares.append(asked / seconds)
    return times, median(shares)


@jax.jit
def relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    """In L2 norm."""
    wide = expected.astype(jnp.float32)
    error = jnp.linalg.norm((got.astype(jnp.float32) - wide).ravel())
    return error / jnp.linalg.norm(wide.ravel())
