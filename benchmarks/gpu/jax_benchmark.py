"""jax_bnar and its variants, plain Flax under XLA, and a copy, at the sites of ResNet-50.

One step is forward and backward at one site, without running statistics: y, dx, [dz] and the
gradients of scale and bias. chain.py says how it is timed; a sample lasts about 20 ms.
`copies` counts the copies and transposes of large arrays in the compiled program, which would be
part of the time; `kernels` names ours that ran.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import jax
import jax.numpy as jnp

from benchmarks.common.cuda_settings import cuda_settings
from benchmarks.common.hlo_text import layout_changes
from benchmarks.common.sites import Site
from benchmarks.gpu import work as work_module
from benchmarks.gpu.chain import chain, make_operands, measure, relative_error
from benchmarks.gpu.device import describe_device
from benchmarks.gpu.launches import launched
from benchmarks.gpu.work import ERROR_ALLOWED, Results, Wave, Work
from benchmarks.sites.peers import flax_linen, ours

Step = Callable[..., tuple[Any, ...]]

STRATEGIES: Final = ("two_kernels", "on_chip", "cluster")
MAIN_PEERS: Final = ("copy", "ours_mask", "ours", "flax")
# The variables that force a choice, which the kernels otherwise make by the shape.
VARIANTS: Final = {
    **{f"ours_{name}": {"JAX_BNAR_CUDA_STRATEGY": name} for name in STRATEGIES},
    **{f"ours_slab_{n}": {"JAX_BNAR_CUDA_SLAB_CHANNELS": str(n)} for n in (32, 64, 128, 256)},
}
MORE_PEERS: Final = tuple(VARIANTS)
DECISIVE_PEERS: Final = ("ours_slab_64", "ours_slab_128")


def copy_step(x: Any, z: Any, dy: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
    """Moves as many bytes as a copy, which XLA would optimise away."""
    return (-x,)


def step_of(peer: str, site: Site, wave: Wave) -> Step:
    """Returns a function from (x, z, dy, scale, bias) to (y, dx, [dz], dscale, dbias)."""
    if peer == "copy":
        return copy_step
    if peer == "flax":
        step = ours.gradient_step(flax_linen.operator(site, wave.dtype))
    else:
        operator = ours.operator(site, save="mask" if peer == "ours_mask" else "y")
        step = ours.gradient_step(operator)
    return lambda x, z, dy, scale, bias: step(x, z, scale, bias, dy)


def shapes_of(site: Site, wave: Wave, sets: int) -> tuple[Any, ...]:
    x = jax.ShapeDtypeStruct(site.shape(wave.batch), wave.dtype)
    vector = jax.ShapeDtypeStruct((site.channels,), jnp.float32)
    return [(x, x if site.form == "bn_add_relu" else None, x)] * sets, vector, vector


def compile_chain(peer: str, site: Site, wave: Wave, work: Work) -> Any:
    shapes = shapes_of(site, wave, work.sets(site, wave))
    return jax.jit(chain(step_of(peer, site, wave))).lower(*shapes).compile()


def variant_of(peer: str) -> contextlib.AbstractContextManager[None]:
    """Sets a variant's variables."""
    return cuda_settings(**VARIANTS.get(peer, {}))


def check(got: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    """Returns the errors of y, dx, [dz], dscale and dbias; ValueError if one is too large."""
    pairs = zip(got, expected, strict=True)
    errors = [float(relative_error(a, b)) for a, b in pairs if a is not None]
    if not all(error <= ERROR_ALLOWED for error in errors):
        raise ValueError(f"y, dx, [dz], dscale, dbias differ from Flax by {errors} in norm")
    return errors


def reference_of(program: Future[Any], operands: Any) -> Any:
    """Flax's results of the first set, or None if Flax fails here; then nothing is compared."""
    try:
        return jax.block_until_ready(program.result()(*operands)[0])
    except Exception as error:
        print(f"nothing to compare with, Flax failed: {str(error)[:500]}", flush=True)
        return None


def run_wave(work: Work, wave: Wave, results: Results, pool: ThreadPoolExecutor) -> None:
    """Measures site by site, so that a run that is cut off has all peers where it has any."""
    for site in work.sites_of(wave):
        if work.time_is_up():
            return
        peers = results.left(site, wave)
        if not peers:
            continue
        # What they are compared with, whether or not it is among what is timed in this wave.
        needed = dict.fromkeys(["flax", *peers])
        programs = {peer: pool.submit(compile_chain, peer, site, wave, work) for peer in needed}
        # Compiling takes the host's cores from what is measured, so it ends before.
        wait(programs.values())
        sets, rounds = work.sets(site, wave), work.rounds(site, wave)
        operands = make_operands(shapes_of(site, wave, sets))
        reference = reference_of(programs["flax"], operands)
        for peer in peers:
            try:
                compiled = programs[peer].result()
                with variant_of(peer), launched() as kernels:
                    times, share = measure(compiled, operands, work.samples, sets, rounds)
                    first: Any = compiled(*operands)[0] if peer != "copy" else None
                    jax.block_until_ready(first)
                more: dict[str, Any] = {
                    "copies": len(
                        layout_changes(compiled.as_text() or "", site.elements(wave.batch))
                    ),
                    "host_share": round(share, 3),
                    "kernels": sorted(kernels),
                }
                if peer != "copy" and reference is not None:
                    more["errors"] = check(first, reference)
                results.add(site, wave, peer, times, sets=sets, rounds=rounds, **more)
            except Exception as error:
                results.fail(site, wave, peer, error)
        del operands, reference
        print(f"{site.label}: {len(results.document['rows'])} rows", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    work = work_module.parse(__doc__, arguments, MAIN_PEERS, MORE_PEERS, DECISIVE_PEERS)
    expected = "cpu" if work.platform == "cpu" else "gpu"
    if jax.default_backend() != expected:
        raise SystemExit(f"JAX runs on {jax.default_backend()}, expected {expected}.")
    results = Results(work, "jax", describe_device())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return results.fill(work.waves, lambda wave: run_wave(work, wave, results, pool))


if __name__ == "__main__":
    raise SystemExit(main())
