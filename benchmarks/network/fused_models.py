"""Measures a training step of seven libraries' ResNets, with and without `jax_bnar.fuse`.

python -m benchmarks.network.fused_models --output benchmarks/results/NAME.json
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import jax_bnar
from benchmarks.common.contention import Contention, warning
from benchmarks.common.document import begin
from benchmarks.common.json_file import write_json
from benchmarks.models.network import LIBRARIES, STAGES, build

MIB: Final = 2**20
# The largest relative difference of the losses: both are the same network, up to rounding.
_TOLERANCE: Final = 1e-3


@dataclasses.dataclass(frozen=True)
class Options:
    """Time a training step of one model after another, with and without `fuse`."""

    libraries: tuple[str, ...] = LIBRARIES
    stages: tuple[int, ...] = STAGES
    width: int = 64
    """Channels of the stem."""
    size: int = 64
    """Height and width of the pictures."""
    batch: int = 8
    rounds: int = 15
    """Samples of each program; the two take turns."""
    output: Path | None = None
    """JSON file for the results, updated after each library."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document = begin(options) | {"models": {}}
    for library in options.libraries:
        document["models"][library] = measure(library, options)
        if options.output is not None:
            write_json(options.output, document)
    console.print(table(document["models"]))
    return document


def measure(library: str, options: Options) -> dict[str, Any]:
    """Measures both programs of one library, taking turns."""
    shape = (options.batch, options.size, options.size, 3)
    network = build(library, options.stages, options.width, shape)
    images = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    arguments = network.parameters, network.state, images
    report = jax_bnar.explain(network.loss)(*arguments)
    programs = {
        name: _compiled(loss, arguments)
        for name, loss in (("fused", jax_bnar.fuse(network.loss)), ("plain", network.loss))
    }
    losses = {name: float(program(*arguments)[0]) for name, program in programs.items()}
    if not abs(losses["fused"] - losses["plain"]) <= _TOLERANCE * abs(losses["plain"]):
        raise ValueError(f"{library}: the loss must not depend on fuse, but it does: {losses}.")
    contention = Contention()
    samples = _in_turns(programs, arguments, options.rounds)
    return {
        "operators": {
            name: report.count(name) for name in ("bn_relu", "bn_add_relu", "dual_bn_add_relu")
        },
        "contention": contention.share(),
        **{
            name: {
                **samples[name],
                "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
                "loss": losses[name],
            }
            for name, program in programs.items()
        },
    }


def _compiled(loss: Any, arguments: Sequence[Any]) -> Any:
    """A compiled step of gradient descent that returns loss, state and new parameters."""

    def step(parameters: Any, state: Any, images: jax.Array) -> Any:
        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(parameters, state, images)
        return value, state, jax.tree.map(lambda p, g: p - 0.01 * g, parameters, gradient)

    return jax.jit(step).lower(*arguments).compile()


def _in_turns(programs: dict[str, Any], arguments: Any, rounds: int) -> dict[str, Any]:
    """Wall-clock and processor milliseconds; the programs swap their order in each round."""
    samples: dict[str, Any] = {name: {"wall_ms": [], "processor_ms": []} for name in programs}
    names = list(programs)
    for index in range(rounds):
        for name in names if index % 2 else names[::-1]:
            wall, processor = perf_counter(), process_time()
            jax.block_until_ready(programs[name](*arguments))
            samples[name]["wall_ms"].append((perf_counter() - wall) * 1e3)
            samples[name]["processor_ms"].append((process_time() - processor) * 1e3)
    return samples


def table(models: dict[str, Any]) -> Table:
    result = Table("library", "processor ms", "ratio", "wall ms", "ratio", "temporary MiB", "ratio")
    result.title = "a training step, with fuse / without; times are minima"
    for library, model in models.items():
        cells = []
        for digits, unit, value in (
            (0, 1, lambda program: min(program["processor_ms"])),
            (0, 1, lambda program: min(program["wall_ms"])),
            (1, MIB, lambda program: program["temporary_bytes"]),
        ):
            fused, plain = value(model["fused"]), value(model["plain"])
            cells += [
                f"{fused / unit:.{digits}f} / {plain / unit:.{digits}f}",
                f"{fused / plain:.2f}",
            ]
        result.add_row(library, *cells)
    result.caption = warning([model["contention"] for model in models.values()])
    return result


if __name__ == "__main__":
    main()
