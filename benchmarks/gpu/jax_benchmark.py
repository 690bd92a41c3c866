"""jax_bnar, each of its strategies, plain Flax under XLA, and a copy, at the sites of ResNet-50.

One step is forward and backward at one site, without running statistics: y, dx, [dz] and the
gradients of scale and bias. Of small sites a step takes less than the host needs to ask for one, so
a program holds a step for each of several sets of operands (together several times the L2, so that
each set comes from memory), and the host, which does not wait, asks for the next program while the
device is busy with the last. A sample is the wall-clock time of enough programs for about 20 ms,
over all their steps; `host_share` is the part of it after which the host had asked for everything:
near 1 it may be the host that was timed. XLA may replay a program as a CUDA graph, for all peers
alike. Barriers tie the operands of a step to the results of the one before, so that XLA does not
merge those of two sets, and all results are returned, so that none is optimised away. `copies`
counts the copies of large arrays in the compiled program, which would be part of the time;
`kernels` names ours that ran.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any, Final

import jax
import jax.numpy as jnp

from benchmarks.gpu import work as work_module
from benchmarks.gpu.device import describe_device
from benchmarks.gpu.launches import launched
from benchmarks.gpu.work import Results, Wave, Work
from benchmarks.peers import flax_linen, ours
from benchmarks.sites import Site

Step = Callable[..., tuple[Any, ...]]

STRATEGIES: Final = ("on_chip", "cluster", "l2", "two_kernels")
MAIN_PEERS: Final = ("copy", "ours", "ours_mask", "flax")
MORE_PEERS: Final = tuple(f"ours_{name}" for name in STRATEGIES)
_VARIABLE: Final = "JAX_BNAR_CUDA_STRATEGY"


def copy_step(x: Any, z: Any, scale: Any, bias: Any, dy: Any) -> tuple[Any, ...]:
    """As many bytes as a copy moves; XLA would leave out the copy itself."""
    return (-x,)


def step_of(peer: str, site: Site, wave: Wave) -> Step:
    """(x, z, scale, bias, dy) to (y, dx, [dz], dscale, dbias)."""
    if peer == "copy":
        return copy_step
    if peer == "flax":
        return flax_linen.gradient_step(site, wave.dtype)
    return ours.gradient_step(site, save="mask" if peer == "ours_mask" else "y")


def chain(step: Step) -> Callable[..., Any]:
    """Sets of (x, z, dy) to the results of all of them, one after the other."""

    def run(sets: Any, scale: Any, bias: Any) -> Any:
        results = []
        for operands in sets:
            if results:
                # XLA drops from a barrier what is not used behind it.
                (operands, scale, bias), results[-1] = jax.lax.optimization_barrier(
                    ((operands, scale, bias), results[-1])
                )
            x, z, dy = operands
            results.append(step(x, z, scale, bias, dy))
        return results

    return run


def shapes_of(site: Site, wave: Wave, sets: int) -> tuple[Any, ...]:
    x = jax.ShapeDtypeStruct(site.shape(wave.batch), wave.dtype)
    vector = jax.ShapeDtypeStruct((site.channels,), jnp.float32)
    return [(x, x if site.form == "bn_add_relu" else None, x)] * sets, vector, vector


def make_operands(site: Site, wave: Wave, sets: int) -> tuple[Any, ...]:
    """Random numbers, made on the device."""

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def normal(seed: Any, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)

    leaves, tree = jax.tree.flatten(shapes_of(site, wave, sets))
    arrays = [normal(seed, leaf.shape, leaf.dtype) for seed, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, arrays)


def compile_chain(peer: str, site: Site, wave: Wave, work: Work) -> Any:
    shapes = shapes_of(site, wave, work.sets(site, wave))
    return jax.jit(chain(step_of(peer, site, wave))).lower(*shapes).compile()


def large_copies(compiled: Any, site: Site, wave: Wave) -> int:
    """Copies in the program of arrays of x's size: `copy` and transposes by another name."""
    elements = site.elements(wave.batch)
    count = 0
    for line in (compiled.as_text() or "").splitlines():
        head, is_copy, _ = line.partition(" copy(")
        if is_copy and (inside := head.rpartition("[")[2].partition("]")[0]):
            size = 1
            for n in inside.split(","):
                size *= int(n)
            count += size >= elements
    return count


@contextlib.contextmanager
def strategy_of(peer: str) -> Iterator[None]:
    """The kernels read it when they are launched; each peer's program is its own."""
    name = peer.removeprefix("ours_")
    if name in STRATEGIES:
        os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


@jax.jit
def relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    wide = expected.astype(jnp.float32)
    error = jnp.linalg.norm((got.astype(jnp.float32) - wide).ravel())
    return error / jnp.linalg.norm(wide.ravel())


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


# Near 0 rounding opens a gate in one and shuts it in the other: in bfloat16 that alone is 0.05. Who
# computes something else is off by about 1; how well each rounds is for tests/.
_ERROR_ALLOWED: Final = 0.15


def check(got: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    """Errors of y, dx, [dz], dscale and dbias against Flax's, in L2 norm; raises ValueError."""
    pairs = zip(got, expected, strict=True)
    errors = [float(relative_error(a, b)) for a, b in pairs if a is not None]
    if not all(error <= _ERROR_ALLOWED for error in errors):
        raise ValueError(f"y, dx, [dz], dscale, dbias differ from Flax by {errors} in norm")
    return errors


def run_wave(work: Work, wave: Wave, results: Results, pool: ThreadPoolExecutor) -> None:
    pairs = [(site, peer) for site in work.sites for peer in wave.peers]
    programs = {pair: pool.submit(compile_chain, pair[1], pair[0], wave, work) for pair in pairs}
    # Compiling takes the host's cores from what is measured.
    for site, peer in pairs:
        programs[site, peer].exception()
    for site in work.sites:
        if work.time_is_up():
            return
        sets, rounds = work.sets(site, wave), work.rounds(site, wave)
        operands = make_operands(site, wave, sets)
        reference: Any = None
        # Flax first: what the others are compared with.
        for peer in sorted(wave.peers, key=lambda peer: peer != "flax"):
            try:
                compiled = programs.pop((site, peer)).result()
                with strategy_of(peer), launched() as kernels:
                    times, share = measure(compiled, operands, work.samples, sets, rounds)
                    first: Any = compiled(*operands)[0] if peer != "copy" else None
                    jax.block_until_ready(first)
                if peer == "flax":
                    reference = first
                more: dict[str, Any] = {
                    "copies": large_copies(compiled, site, wave),
                    "host_share": round(share, 3),
                    "kernels": sorted(kernels),
                }
                if peer != "copy" and reference is not None:
                    more["errors"] = check(first, reference)
                results.add(site, wave, peer, times, sets=sets, rounds=rounds, **more)
            except Exception as error:
                results.fail(site, wave, peer, error)
        del operands, reference


def main(arguments: Sequence[str] | None = None) -> int:
    work = work_module.parse(__doc__, arguments, MAIN_PEERS, MORE_PEERS)
    expected = "cpu" if work.platform == "cpu" else "gpu"
    if jax.default_backend() != expected:
        raise SystemExit(f"JAX runs on {jax.default_backend()}, expected {expected}.")
    results = Results(work, {"family": "jax", "device": describe_device()})
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return results.fill(work.waves, lambda wave: run_wave(work, wave, results, pool))


if __name__ == "__main__":
    raise SystemExit(main())
