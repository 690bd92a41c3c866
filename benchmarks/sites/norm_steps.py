"""Forward and backward of a norm by several libraries: checked against each other, then timed.

A step takes x, dy, scale and bias, whose channels come last, and gives y, dx, dscale and dbias.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.agreement import check_agree
from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.document import begin, finish
from jax_bnar._benchmark.timing import interleave

# Makes the step of a library from a dtype and the four arrays.
Maker = Callable[..., Callable[[], Any]]


def measure_networks(
    options: Any,
    measure_network: Callable[[Any, Any, str], dict[str, Any]],
    table: Callable[[Sequence[dict[str, Any]], Any], Table],
) -> dict[str, Any]:
    """Measures the norms of networks in each dtype, prints the table and writes the document.

    Args:
        options: those of a command, with `networks`, `dtype`, `peers` and `output`.
        measure_network: gives, for the options, a network's name and a dtype, a run with `sites`.
        table: draws the runs.
    """
    console = Console()
    document = begin(options, options.peers)
    runs = [
        measure_network(options, name, dtype)
        for name in options.networks
        for dtype in options.dtype
    ]
    console.print(table(runs, options))
    print_warning((site["contention"] for run in runs for site in run["sites"]), console)
    document["runs"] = runs
    finish(document, options, console)
    return document


def measure(
    makers: Mapping[str, Maker],
    dtype: str,
    shape: Sequence[int],
    rounds: int,
    min_sample_ms: float,
) -> dict[str, Any]:
    """Times the steps of those libraries that are installed, which take turns.

    Raises:
        AssertionError: they do not compute the same, up to rounding.
    """
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32) for _ in range(2))
    scale = 1 + 0.1 * rng.standard_normal(shape[-1], np.float32)
    bias = 0.1 * rng.standard_normal(shape[-1], np.float32)
    steps: dict[str, Callable[[], Any]] = {}
    for peer, make in makers.items():
        try:
            steps[peer] = make(dtype, x, dy, scale, bias)
        except ImportError:
            continue  # PyTorch is optional.
    first, *others = ([_to_numpy(array) for array in step()] for step in steps.values())
    for other in others:
        check_agree(first, other, 1e-3 if dtype == "float32" else 0.05)
    contention = Contention()
    timings = interleave(steps, rounds=rounds, min_sample_ms=min_sample_ms)
    return {
        "contention": contention.share(),
        "peers": {peer: timing.as_dict() for peer, timing in timings.items()},
    }


def jax_step(function: Callable[..., jax.Array], dtype: str, *operands: Any) -> Callable[[], Any]:
    """The step of a function of x, scale and bias."""
    x, dy, scale, bias = operands

    def step(x: Any, dy: Any, scale: Any, bias: Any) -> Any:
        y, vjp = jax.vjp(function, x, scale, bias)
        return y, *vjp(dy)

    given = (jnp.asarray(x, dtype), jnp.asarray(dy, dtype), jnp.asarray(scale), jnp.asarray(bias))
    compiled = jax.jit(step).lower(*given).compile()
    return lambda: jax.block_until_ready(compiled(*given))


def totals(sites: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The milliseconds of each peer, with each site as often as it occurs."""
    return {
        peer: sum(site["count"] * site["peers"][peer]["median_ms"] for site in sites)
        for peer in sites[0]["peers"]
    }


def least_ratio(sites: Sequence[Mapping[str, Any]], ours: str) -> float | None:
    """The time of the fastest other peer over ours, at the site where that is least."""
    ratios = [
        min(times["median_ms"] for peer, times in site["peers"].items() if peer != ours)
        / site["peers"][ours]["median_ms"]
        for site in sites
        if len(site["peers"]) > 1 and ours in site["peers"]
    ]
    return min(ratios, default=None)


def _to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array):
        return np.asarray(array.astype(jnp.float32))
    # PyTorch has the channels on the second axis.
    values = array.detach().float().numpy()
    return np.moveaxis(values, 1, -1) if values.ndim > 1 else values
