"""Other activations than ReLU, at the BatchNorm sites of EfficientNet, MobileNetV3 and YOLOv8.

python -m benchmarks.sites.activations --output benchmarks/results/NAME.json

Each step is forward and backward of act(batch_norm(x)), by `jax_bnar.bn_act`, by
`flax.linen.BatchNorm` and the activation under XLA, and by PyTorch eager in channels_last, with the
activation in place where PyTorch has that and autograd allows it.
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

EPSILON: Final = 1e-5
Peer = Literal["ours", "flax", "torch"]
Activation = Literal[
    "silu", "hard_silu", "leaky_relu", "relu6", "gelu", "exact_gelu", "elu", "mish"
]
NetworkName = Literal["efficientnet_b0", "mobilenet_v3_large", "yolov8n"]


class Network(NamedTuple):
    """The activation, and how many norms it follows, by height (which is also width), channels."""

    activation: Activation
    sites: dict[tuple[int, int], int]


# By the tables of the papers at 224x224 pictures, and of YOLOv8-n at 640x640.
NETWORKS: Final[dict[NetworkName, Network]] = {
    "efficientnet_b0": Network(
        "silu",
        {
            (112, 32): 2, (112, 96): 1, (56, 96): 1, (56, 144): 3, (28, 144): 1, (28, 240): 3,
            (14, 240): 1, (14, 480): 6, (14, 672): 5, (7, 672): 1, (7, 1152): 8, (7, 1280): 1,
        },
    ),
    "mobilenet_v3_large": Network(
        "hard_silu",
        {
            (112, 16): 1, (28, 240): 1, (14, 240): 1, (14, 200): 2, (14, 184): 4, (14, 480): 2,
            (14, 672): 3, (7, 672): 1, (7, 960): 5,
        },
    ),
    "yolov8n": Network(
        "silu",
        {
            (320, 16): 1, (160, 32): 3, (160, 16): 2, (80, 64): 7, (80, 32): 6, (80, 80): 2,
            (40, 128): 7, (40, 64): 11, (40, 80): 2, (20, 256): 6, (20, 128): 6, (20, 64): 2,
            (20, 80): 2,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Times act(batch_norm(x)), forward + backward."""

    networks: tuple[NetworkName, ...] = ("efficientnet_b0", "mobilenet_v3_large", "yolov8n")
    activation: Activation | None = None
    """Another activation at the same sites."""
    dtype: tuple[str, ...] = ("float32", "bfloat16")
    peers: tuple[Peer, ...] = ("ours", "flax", "torch")
    batch: int = 8
    sites: int = 100
    """How many sites of each network, the first ones."""
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
    activation = options.activation or network.activation
    sites: list[dict[str, Any]] = [
        _site(options, activation, dtype, height, channels) | {"count": count}
        for (height, channels), count in list(network.sites.items())[: options.sites]
    ]
    say(f"{name} {dtype}: {len(sites)} sites done")
    run: dict[str, Any] = {
        "network": name,
        "activation": activation,
        "dtype": dtype,
        "batch": options.batch,
    }
    return run | {"sites": sites, "total_ms": totals(sites)}


def _site(
    options: Options, activation: Activation, dtype: str, height: int, channels: int
) -> dict[str, Any]:
    makers = {peer: functools.partial(_STEPS[peer], activation) for peer in options.peers}
    shape = (options.batch, height, height, channels)
    measured = measure(makers, dtype, shape, options.rounds, options.min_sample_ms)
    return {"height": height, "channels": channels, **measured}


def _of_jax(name: Activation) -> Callable[[Any], jax.Array]:
    if name == "exact_gelu":
        return functools.partial(jax.nn.gelu, approximate=False)
    return getattr(jax.nn, name)


def _ours(activation: Activation, dtype: str, *operands: Any) -> Callable[[], Any]:
    def function(x: Any, scale: Any, bias: Any) -> jax.Array:
        return jax_bnar.bn_act(x, scale, bias, activation, epsilon=EPSILON).y

    return jax_step(function, dtype, *operands)


def _flax(activation: Activation, dtype: str, *operands: Any) -> Callable[[], Any]:
    layer = nn.BatchNorm(use_running_average=False, epsilon=EPSILON, dtype=jnp.dtype(dtype))

    def function(x: Any, scale: Any, bias: Any) -> jax.Array:
        statistics = {"mean": jnp.zeros_like(scale), "var": jnp.ones_like(scale)}
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": statistics}
        y, _ = layer.apply(variables, x, mutable=["batch_stats"])
        return _of_jax(activation)(y)

    return jax_step(function, dtype, *operands)


def _torch(activation: Activation, dtype: str, *operands: Any) -> Callable[[], Any]:
    # Only here, because PyTorch is optional.
    from benchmarks.sites.peers import torch_activation

    return torch_activation.step(activation, dtype, *operands)


_STEPS: Final[dict[Peer, Callable[..., Callable[[], Any]]]] = {
    "ours": _ours,
    "flax": _flax,
    "torch": _torch,
}


def _table(runs: Sequence[dict[str, Any]], options: Options) -> Table:
    table = Table(title=f"act(batch_norm(x)), forward + backward, batch {options.batch}, ms")
    for column in ("network", "activation", "dtype", *options.peers, "against XLA", "slowest site"):
        table.add_column(column)
    for run in runs:
        total = run["total_ms"]
        ratio = least_ratio(run["sites"], "ours")
        table.add_row(
            run["network"],
            run["activation"],
            run["dtype"],
            *(f"{total[peer]:.1f}" if peer in total else "-" for peer in options.peers),
            f"{total['flax'] / total['ours']:.2f}" if {"flax", "ours"} <= total.keys() else "-",
            f"{ratio:.2f}" if ratio else "-",
        )
    return table


if __name__ == "__main__":
    main()
