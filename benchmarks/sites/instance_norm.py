"""InstanceNorm and an activation, at the norms of a CycleGAN and of a U-Net for volumes.

python -m benchmarks.sites.instance_norm --output benchmarks/results/NAME.json

Each step is forward and backward of act(instance_norm(x)): `flax.linen.InstanceNorm` under
`jax_bnar.fuse`, the same without it, and PyTorch eager with the channels first, where its
InstanceNorm is fastest, and the activation in place.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro
from rich.table import Table

import jax_bnar
from benchmarks.common.isa import IsaName
from benchmarks.common.progress import say
from benchmarks.sites.norm_steps import (
    jax_step,
    least_ratio,
    measure,
    measure_networks,
    totals,
)
from benchmarks.sites.problem import EPSILON

Peer = Literal["fuse", "flax", "torch"]
NetworkName = Literal["cyclegan", "unet3d"]


class Network(NamedTuple):
    """The batch, the slope below 0, and how many norms there are of each shape of an example."""

    batch: int
    negative_slope: float
    sites: dict[tuple[int, ...], int]


NETWORKS: Final[dict[NetworkName, Network]] = {
    # The generator for pictures of 256x256 (arXiv:1703.10593), but for the second norms of its nine
    # residual blocks, which no activation follows.
    "cyclegan": Network(4, 0.0, {(256, 256, 64): 2, (128, 128, 128): 2, (64, 64, 256): 9}),
    # As nnU-Net configures itself (arXiv:1904.08128), with patches of 64x64x64.
    "unet3d": Network(
        2,
        0.01,
        {
            (64, 64, 64, 32): 4, (32, 32, 32, 64): 4, (16, 16, 16, 128): 4, (8, 8, 8, 256): 4,
            (4, 4, 4, 320): 2,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Times act(instance_norm(x)), forward + backward."""

    networks: tuple[NetworkName, ...] = ("cyclegan", "unet3d")
    dtype: tuple[str, ...] = ("float32", "bfloat16")
    peers: tuple[Peer, ...] = ("fuse", "flax", "torch")
    divide_sizes: int = 1
    """By how much the sizes of pictures and volumes are divided, for small machines."""
    rounds: int = 7
    min_sample_ms: float = 10.0
    isa: IsaName | None = None
    """The best instruction set that all peers may use; default: whatever each finds."""
    output: Path | None = None
    """JSON file for the results; without one they are only printed."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    return measure_networks(options, _network, _table)


def _network(options: Options, name: NetworkName, dtype: str) -> dict[str, Any]:
    network = NETWORKS[name]
    sites: list[dict[str, Any]] = []
    for (*sizes, channels), count in network.sites.items():
        divided = (max(2, size // options.divide_sizes) for size in sizes)
        shape = network.batch, *divided, channels
        sites.append(_site(options, network.negative_slope, dtype, shape) | {"count": count})
    say(f"{name} {dtype}: done")
    return {"network": name, "dtype": dtype, "sites": sites, "total_ms": totals(sites)}


def _site(
    options: Options, negative_slope: float, dtype: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    makers = {peer: functools.partial(_STEPS[peer], negative_slope) for peer in options.peers}
    measured = measure(makers, dtype, shape, options.rounds, options.min_sample_ms)
    return {"shape": shape, **measured}


def _of_jax(is_fused: bool, negative_slope: float, dtype: str, *operands: Any) -> Callable[[], Any]:
    layer = nn.InstanceNorm(epsilon=EPSILON, dtype=jnp.dtype(dtype))

    def function(x: Any, scale: Any, bias: Any) -> jax.Array:
        y: Any = layer.apply({"params": {"scale": scale, "bias": bias}}, x)
        return nn.leaky_relu(y, negative_slope) if negative_slope else nn.relu(y)

    return jax_step(jax_bnar.fuse(function) if is_fused else function, dtype, *operands)


def _torch(negative_slope: float, dtype: str, *operands: Any) -> Callable[[], Any]:
    # Only here, because PyTorch is optional.
    from benchmarks.sites.peers import torch_instance_norm

    return torch_instance_norm.step(negative_slope, dtype, *operands)


_STEPS: Final[dict[Peer, Callable[..., Callable[[], Any]]]] = {
    "fuse": functools.partial(_of_jax, True),
    "flax": functools.partial(_of_jax, False),
    "torch": _torch,
}


def _table(runs: Sequence[dict[str, Any]], options: Options) -> Table:
    table = Table(title="act(instance_norm(x)), forward + backward, ms")
    for column in ("network", "dtype", *options.peers, "least ratio"):
        table.add_column(column)
    for run in runs:
        ratio = least_ratio(run["sites"], "fuse")
        total = run["total_ms"]
        table.add_row(
            run["network"],
            run["dtype"],
            *(f"{total[peer]:.1f}" if peer in total else "-" for peer in options.peers),
            f"{ratio:.2f}" if ratio else "-",
        )
    return table


if __name__ == "__main__":
    main()
