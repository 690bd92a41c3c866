"""Bytes that ResNet-50's BatchNorms send between devices in a training step, ours and Flax's.

    python -m benchmarks.sharding.collective_bytes [--json]

A layer is compiled on eight CPU devices for each number of channels, and its collectives are
counted in the HLO. Their payload does not depend on the number of devices; in a ring all-reduce
over n devices, each device sends and receives 2*(n-1)/n times the payload.
"""

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from benchmarks.common.progress import say
from benchmarks.common.sites import RESNET50_SITES
from benchmarks.sharding.hlo_collectives import collectives, total_bytes
from jax_bnar.flax_layers import BatchNorm

DEVICES: Final = 8
TABLE: Final = (1, 2, 4, 8, 16, 64, 256, 1024)
PEERS: Final[dict[str, Callable[..., nn.Module]]] = {
    "jax_bnar": functools.partial(BatchNorm, activation="relu"),
    "Flax": nn.BatchNorm,
    "Flax, use_fast_variance=False": functools.partial(nn.BatchNorm, use_fast_variance=False),
}


def step(layer: nn.Module) -> Callable[..., Any]:
    """A function that computes the result, running statistics and gradients for a cotangent."""

    def function(variables: Any, x: jax.Array, dy: jax.Array) -> Any:
        def forward(params: Any, x: jax.Array) -> Any:
            y, updated = layer.apply(
                {**variables, "params": params},
                x,
                use_running_average=False,
                mutable=["batch_stats"],
            )
            return jax.nn.relu(y), updated

        y, vjp, updated = jax.vjp(forward, variables["params"], x, has_aux=True)
        return y, updated, vjp(dy)

    return function


def of_site(layer: nn.Module, channels: int) -> tuple[int, int]:
    """The number of all-reduces of one site with this many channels, and their bytes."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.ones((DEVICES, 2, channels), jnp.float32), by_batch)
    vector = jnp.ones(channels, jnp.float32)
    variables = {
        "params": {"scale": vector, "bias": vector},
        "batch_stats": {"mean": vector, "var": vector},
    }
    found = collectives(step(layer), variables, x, x)
    others = {each.opcode for operation in found for each in operation} - {"all-reduce"}
    if others:
        raise AssertionError(f"{type(layer).__name__} also compiles to {', '.join(others)}")
    return len(found), total_bytes(found)


def of_step(make: Callable[..., nn.Module]) -> tuple[int, int]:
    """The number of all-reduces and their bytes, summed over the 53 sites of ResNet-50."""
    sites: Counter[int] = Counter()
    for site in RESNET50_SITES:
        sites[site.channels] += site.count
    operations = payload = 0
    for channels, count in sites.items():
        each, nbytes = of_site(make(), channels)
        operations, payload = operations + count * each, payload + count * nbytes
    return operations, payload


def main(json_wanted: bool = False) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    table = Table(title="BatchNorm collectives of a ResNet-50 training step")
    table.add_column("devices", justify="right")
    steps = {}
    for name, make in PEERS.items():
        say(f"compiling {name}")
        steps[name] = of_step(make)
    if json_wanted:
        payload = {name: {"all_reduces": n, "bytes": size} for name, (n, size) in steps.items()}
        print(json.dumps(payload, indent=1))
        return
    for name in steps:
        head = name.replace(", use_fast_variance=", ",\nuse_fast_\nvariance\n=")
        table.add_column(f"{head}\nall-\nreduces", justify="right")
        table.add_column("kB per\ndevice", justify="right")
    for devices in TABLE:
        cells = []
        for operations, payload in steps.values():
            sent = 2 * (devices - 1) / devices * payload
            cells += [str(operations if devices > 1 else 0), f"{sent / 1e3:.0f}"]
        table.add_row(str(devices), *cells)
    console = Console()
    console.print(table)
    for name, (operations, payload) in steps.items():
        console.print(f"{name}: {operations} all-reduces, {payload} bytes in total")


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
