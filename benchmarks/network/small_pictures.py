"""Measures a training step of ResNet-18 and MobileNetV2 on small pictures, plain and under `fuse`.

python -m benchmarks.network.small_pictures --output benchmarks/results/NAME.json
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
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
from benchmarks.common.isa import IsaName
from benchmarks.common.json_file import write_json
from benchmarks.common.progress import say
from benchmarks.models.small import NETWORKS
from benchmarks.network.step_program import initial_state, loss_function, sgd_step
from benchmarks.network.training_step import DType, check_losses
from jax_bnar._benchmark.memory import planned_memory
from jax_bnar._benchmark.timing import interleave

MIB: Final = 2**20
# Pictures of at most this size go through the small stem.
_SMALL_STEM: Final = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a training step on small pictures, plain Flax beside the same under `fuse`."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (96, 16))
    """Pairs of the pictures' height and width, and the batch size."""
    rounds: int = 9
    """Samples of each program."""
    isa: IsaName | None = None
    """The best instruction set that our kernels and XLA may use, as in `benchmarks.sites.run`."""
    output: Path | None = None
    """JSON file for the results, updated after each step."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    document = begin(options) | {"runs": []}
    for network in options.networks:
        for size, batch in options.sizes:
            for dtype in options.dtype:
                document["runs"].append(measure(network, size, batch, dtype, options.rounds))
                if options.output is not None:
                    write_json(options.output, document)
    Console().print(table(document["runs"]))
    return document


def measure(network: str, size: int, batch: int, dtype: DType, rounds: int) -> dict[str, Any]:
    """Time and planned memory of the two programs, which take turns."""
    say(f"{network}, {batch} x {size}x{size}, {dtype}")
    net = NETWORKS[network](small_stem=size <= _SMALL_STEM, dtype=jnp.dtype(dtype))
    generator = np.random.default_rng(0)
    images = generator.standard_normal((batch, size, size, 3), np.float32)
    data = jax.device_put((images, generator.integers(0, 10, batch)))
    state = initial_state(jax.jit(net.init)(jax.random.key(0), images))
    loss = loss_function(net)
    programs = {
        name: jax.jit(sgd_step(function)).lower(state, data).compile()
        for name, function in (("fused", jax_bnar.fuse(loss)), ("plain", loss))
    }
    losses = {name: float(program(state, data)[1]) for name, program in programs.items()}
    check_losses(losses, dtype)
    contention = Contention()
    timings = interleave(
        {
            name: lambda program=program: jax.block_until_ready(program(state, data))
            for name, program in programs.items()
        },
        rounds=rounds,
        min_sample_ms=100.0,
    )
    results: dict[str, Any] = {}
    for name, program in programs.items():
        memory = planned_memory(program)
        assert memory is not None
        results[name] = {
            **timings[name].as_dict(),
            "temporary_bytes": memory.temporary,
            "loss": losses[name],
        }
    return {
        "network": network,
        "size": size,
        "batch": batch,
        "dtype": dtype,
        "contention": contention.share(),
        **results,
    }


def table(runs: Sequence[dict[str, Any]]) -> Table:
    result = Table("network", "pictures", "dtype", "plain ms", "fused ms", "ratio", "memory")
    result.title = "a training step; ratios are fused / plain"
    for run in runs:
        fused, plain = run["fused"], run["plain"]
        result.add_row(
            run["network"],
            f"{run['batch']} x {run['size']}x{run['size']}",
            run["dtype"],
            f"{plain['median_ms']:.0f}",
            f"{fused['median_ms']:.0f}",
            f"{fused['median_ms'] / plain['median_ms']:.2f}",
            f"{fused['temporary_bytes'] / plain['temporary_bytes']:.2f}",
        )
    result.caption = warning([run["contention"] for run in runs])
    return result


if __name__ == "__main__":
    main()
