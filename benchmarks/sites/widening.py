"""Norms in float32 for a 16-bit x, at the BatchNorm sites of ResNet-50.

python -m benchmarks.sites.widening --output benchmarks/results/NAME.json

Each step is forward and backward: by the operators with `out_dtype`, by the operators on an x that
is widened first, and by `flax.linen.BatchNorm` with its result promoted to float32, under XLA.

With --rounded, y is converted to the dtype of x afterwards, as where a convolution in it follows,
and z is converted from it: by `fuse` of Flax's layer, which leaves this to the kernel, by the
operators with `out_dtype`, and by Flax.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

import jax_bnar
from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.document import begin, finish
from benchmarks.common.isa import IsaName
from benchmarks.common.progress import say
from benchmarks.common.sites import RESNET50_SITES, Site
from benchmarks.sites.norm_steps import totals
from benchmarks.sites.peers import flax_linen, ours
from benchmarks.sites.problem import Problem, check_results, expected, make_problem
from benchmarks.sites.problem import Results as SiteResults
from jax_bnar._benchmark.memory import planned_memory
from jax_bnar._benchmark.timing import interleave

MIB: Final = 2**20
Narrow = Literal["bfloat16", "float16"]
PEERS: Final = ("out_dtype", "widened", "flax")
ROUNDED_PEERS: Final = ("fuse", "out_dtype", "flax")


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a norm with float32 outputs on a 16-bit x, forward + backward."""

    rounded: bool = False
    """Whether the result is converted to the dtype of x."""
    dtype: tuple[Narrow, ...] = ("bfloat16",)
    batch: int = 16
    sites: int = 100
    """How many sites, the first ones."""
    rounds: int = 7
    min_sample_ms: float = 10.0
    isa: IsaName | None = None
    """The best instruction set that our kernels and XLA may use, as in `benchmarks.sites.run`."""
    output: Path | None = None
    """JSON file for the results; without one they are only printed."""

    @property
    def peers(self) -> tuple[str, ...]:
        return ROUNDED_PEERS if self.rounded else PEERS


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    sites = RESNET50_SITES[: options.sites]
    document = begin(options)
    document["runs"] = [
        {"dtype": dtype, "sites": [_site(options, site, dtype) for site in sites]}
        for dtype in options.dtype
    ]
    for run in document["runs"]:
        run["total_ms"] = totals(run["sites"])
        console.print(_table(run, options))
        print_warning((site["contention"] for site in run["sites"]), console)
    finish(document, options, console)
    return document


def _site(options: Options, site: Site, dtype: Narrow) -> dict[str, Any]:
    # z and dy may be float32; that they hold numbers of 16 bits changes no time.
    problem = make_problem(site, options.batch, dtype)
    reference = expected(problem)
    steps: dict[str, Callable[[], Any]] = {}
    temporaries = {}
    for peer in options.peers:
        compiled, given = _compiled(peer, problem, options.rounded)
        _check(peer, problem, compiled(*given), reference)
        memory = planned_memory(compiled)
        assert memory is not None
        temporaries[peer] = memory.temporary
        steps[peer] = lambda compiled=compiled, given=given: jax.block_until_ready(compiled(*given))
    contention = Contention()
    timings = interleave(steps, rounds=options.rounds, min_sample_ms=options.min_sample_ms)
    say(f"{site.label} {dtype}: done")
    return {
        "height": site.height,
        "channels": site.channels,
        "form": site.form,
        "count": site.count,
        "contention": contention.share(),
        "peers": {
            peer: {**timing.as_dict(), "temporary_bytes": temporaries[peer]}
            for peer, timing in timings.items()
        },
    }


def _compiled(
    peer: str, problem: Problem, rounded: bool
) -> tuple[jax.stages.Compiled, tuple[Any, ...]]:
    """A compiled step of a peer, from (x, z, scale, bias, dy) to (y, dx, dz, dscale, dbias)."""
    site = problem.site
    if peer in ("flax", "fuse"):
        apply = flax_linen.operator(site, "float32")
    elif peer == "widened":
        apply = ours.on_widened(ours.operator(site))
    else:
        apply = ours.operator(site, out_dtype=jnp.float32)
    if rounded:
        apply = _rounded(apply)
    if peer == "fuse":
        apply = jax_bnar.fuse(apply)
    dtype = jnp.dtype(problem.dtype) if rounded else jnp.float32
    given = (
        jnp.asarray(problem.x, problem.dtype),
        None if problem.z is None else jnp.asarray(problem.z, dtype),
        *map(jnp.asarray, (problem.scale, problem.bias)),
        jnp.asarray(problem.dy, dtype),
    )
    return jax.jit(ours.gradient_step(apply)).lower(*given).compile(), given


def _rounded(apply: ours.Operator) -> ours.Operator:
    """The operator between layers in the dtype of x."""

    def rounded(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        wide = None if z is None else z.astype(jnp.float32)
        y, others = apply(x, wide, scale, bias)
        return y.astype(x.dtype), others

    return rounded


def _check(peer: str, problem: Problem, outputs: Any, reference: SiteResults) -> None:
    """Raises ValueError if the results are wrong; the running statistics are left out."""
    y, dx, dz, dscale, dbias = jax.tree.map(
        lambda array: jax.device_get(array.astype(jnp.float32)), outputs
    )
    statistics = reference.running_mean, reference.running_var
    check_results(peer, problem, SiteResults(y, *statistics, dx, dz, dscale, dbias), reference)


def _table(run: dict[str, Any], options: Options) -> Table:
    to = f"float32 and {run['dtype']}" if options.rounded else "float32"
    title = f"{run['dtype']} to {to}, forward + backward, batch {options.batch}, ms"
    table, peers = Table(title=title), options.peers
    for column in ("site", "n", *peers):
        table.add_column(column)
    for site in run["sites"]:
        table.add_row(
            f"{site['height']}x{site['height']}x{site['channels']} {site['form']}",
            str(site["count"]),
            *(f"{site['peers'][peer]['median_ms']:.2f}" for peer in peers),
        )
    table.add_row("all", "", *(f"{run['total_ms'][peer]:.0f}" for peer in peers))
    largest = (
        max(site["peers"][peer]["temporary_bytes"] for site in run["sites"]) for peer in peers
    )
    table.add_row("most MiB of temporaries", "", *(f"{size / MIB:.0f}" for size in largest))
    return table


if __name__ == "__main__":
    main()
