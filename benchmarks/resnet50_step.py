"""A whole training step of ResNet-50, fused against plain Flax: time, memory, saved residuals.

python -m benchmarks.resnet50_step --output benchmarks/results/NAME.json
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.extend.core import Var
from rich.console import Console
from rich.table import Table

from benchmarks.contention import Contention
from benchmarks.environment import describe_environment
from benchmarks.timing import interleave
from jax_bnar.flax_layers import BatchNorm, ResNet50

DType = Literal["float32", "bfloat16"]
SCHEMA: Final = 1
CLASSES: Final = 1000
NORMS: Final[dict[str, Any]] = {
    "fused": BatchNorm,
    "fused, save=mask": functools.partial(BatchNorm, save="mask"),
    "flax": nn.BatchNorm,
}
MIB: Final = 2**20
# Of the first loss, to the plain network's: the same network, up to rounding.
_TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Options:
    """A training step of ResNet-50 with fused and with plain BatchNorm, interleaved."""

    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    sizes: tuple[tuple[int, int], ...] = ((64, 16), (224, 8))
    """Height and width of the pictures, and how many: pairs."""
    norms: tuple[str, ...] = ("fused", "flax")
    """"fused", "fused, save=mask", "flax"."""
    rounds: int = 7
    """Samples of each network."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Another network, for a smoke run."""
    output: Path | None = None
    """JSON file; it is written after each size and dtype."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": describe_environment(),
        "device": jax.devices()[0].device_kind,
        "settings": {"rounds": options.rounds, "stage_sizes": options.stage_sizes},
        "runs": [],
    }
    for size, batch in options.sizes:
        for dtype in options.dtype:
            document["runs"].append(measure(size, batch, dtype, options))
            if options.output is not None:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(document, indent=1) + "\n")
            console.print(table(document["runs"][-1]))
    return document


def measure(size: int, batch: int, dtype: DType, options: Options) -> dict[str, Any]:
    """Every network's step, its memory and its residuals."""
    steps = {name: Step(name, size, batch, dtype, options.stage_sizes) for name in options.norms}
    first = {name: step.run() for name, step in steps.items()}
    for name, loss in first.items():
        expected = next(reversed(first.values()))
        if not abs(loss - expected) <= _TOLERANCE[dtype] * abs(expected):
            raise ValueError(f"{name}: first loss {loss}, expected {expected}.")
    contention = Contention()
    timings = interleave(
        {name: step.run for name, step in steps.items()},
        rounds=options.rounds,
        min_sample_ms=0.0,
        each_round=lambda: None,
    )
    return {
        "size": size,
        "batch": batch,
        "dtype": dtype,
        "contention": contention.share(),
        "networks": {
            name: {
                "median_ms": timings[name].median_ms,
                "min_ms": timings[name].min_ms,
                "samples_ms": timings[name].samples_ms,
                "first_loss": first[name],
                **step.memory(),
            }
            for name, step in steps.items()
        },
    }


class Step:
    """A compiled training step with its state: forward, backward, SGD with Nesterov."""

    def __init__(
        self, norm: str, size: int, batch: int, dtype: DType, stage_sizes: Sequence[int]
    ) -> None:
        net = ResNet50(
            stage_sizes=tuple(stage_sizes),
            num_classes=CLASSES,
            dtype=jnp.dtype(dtype),
            norm=NORMS[norm],
        )
        optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
        generator = np.random.default_rng(0)
        images = generator.standard_normal((batch, size, size, 3), np.float32)
        self._data = jax.device_put((images, generator.integers(0, CLASSES, batch)))

        def loss_of(params: Any, batch_stats: Any, data: Any) -> tuple[jax.Array, Any]:
            images, labels = data
            logits, updated = net.apply(
                {"params": params, "batch_stats": batch_stats}, images, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(
                jnp.asarray(logits, jnp.float32), labels
            )
            return losses.mean(), updated["batch_stats"]

        def step(state: Any, data: Any) -> tuple[Any, jax.Array]:
            params, batch_stats, momentum = state
            (loss, batch_stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(
                params, batch_stats, data
            )
            updates, momentum = optimizer.update(gradient, momentum, params)
            return (optax.apply_updates(params, updates), batch_stats, momentum), loss

        variables = jax.jit(net.init)(jax.random.key(0), images)
        params, batch_stats = variables["params"], variables["batch_stats"]
        self._residuals = residual_bytes(
            lambda params: loss_of(params, batch_stats, self._data), params
        )
        self._state = (params, batch_stats, optimizer.init(params))
        self._compiled = jax.jit(step, donate_argnums=0).lower(self._state, self._data).compile()

    def run(self) -> float:
        """A step; its loss, which waits for all of it."""
        self._state, loss = self._compiled(self._state, self._data)
        jax.block_until_ready(self._state)
        return float(loss)

    def memory(self) -> dict[str, int]:
        """What XLA has planned; its own `peak_memory_in_bytes` lacks the temporaries here."""
        analysis: Any = self._compiled.memory_analysis()
        outside = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        outside -= analysis.alias_size_in_bytes
        return {
            "peak_bytes": outside + analysis.temp_size_in_bytes,
            "temporary_bytes": analysis.temp_size_in_bytes,
            "saved_residual_bytes": self._residuals,
        }


def residual_bytes(function: Callable[[Any], Any], argument: Any) -> int:
    """What forward keeps for backward, beside its arguments, each array once.

    Before XLA, which may recompute some of it in the plain network.
    """
    jaxpr = jax.make_jaxpr(
        lambda given: jax.tree.leaves(jax.vjp(function, given, has_aux=True)[1])
    )(argument).jaxpr
    arguments = {id(variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    kept: dict[int, Any] = {
        id(variable): variable.aval
        for variable in jaxpr.outvars
        if isinstance(variable, Var) and id(variable) not in arguments
    }
    return sum(aval.size * aval.dtype.itemsize for aval in kept.values())


def table(run: dict[str, Any]) -> Table:
    title = f"{run['batch']} x {run['size']}x{run['size']}, {run['dtype']}"
    result = Table("BatchNorm", "ms a step", "peak MiB", "temporary MiB", "residuals MiB")
    result.title = title
    for name, network in run["networks"].items():
        sizes = (network[f"{kind}_bytes"] for kind in ("peak", "temporary", "saved_residual"))
        result.add_row(
            name,
            f"{network['median_ms']:.0f}",
            *(f"{size / MIB:.0f}" for size in sizes),
        )
    if run["contention"] is not None and run["contention"] > 0.05:
        result.caption = f"other processes took {run['contention']:.0%} of the machine"
    return result


if __name__ == "__main__":
    main()
