"""Speed of single BatchNorm sites of ResNet-50, forward and backward, ours against XLA.

`jax_bnar.benchmark` measures them in separate processes: with the default allocator, and if
libjemalloc is installed, on recycled memory, because fresh pages for large results cost both sides
more than the arithmetic. (`benchmarks/` measures every site, in more ways.)

    python examples/digits/speed.py [--quick]      prints one JSON object per site
"""

import ctypes.util
import dataclasses
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jax_bnar


@dataclasses.dataclass(frozen=True)
class Site:
    """A BatchNorm with a ReLU of ResNet-50, at the end of a block with the residual."""

    size: int
    channels: int
    has_residual: bool

    @property
    def label(self) -> str:
        operator = "bn_add_relu" if self.has_residual else "bn_relu"
        return f"{self.size}x{self.size}x{self.channels} {operator}"


SITES: Final = (
    Site(56, 64, False),
    Site(56, 256, True),
    Site(28, 512, True),
    Site(14, 1024, True),
    Site(7, 2048, True),
)
BATCH: Final = 16
ROUNDS: Final = 11
QUICK_SITES: Final = (Site(14, 256, False), Site(7, 512, True))
QUICK_BATCH: Final = 2
QUICK_ROUNDS: Final = 3

# Never return freed pages to the system, so that results land on pages that were touched before.
_MALLOC_CONF: Final = (
    "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,oversize_threshold:0,narenas:1"
)


@dataclasses.dataclass
class SiteSpeed:
    """Milliseconds per forward and backward pass at a site: medians over interleaved rounds."""

    site: str
    batch: int
    fused_ms: float
    xla_ms: float
    allocator: str

    @property
    def speedup(self) -> float:
        return self.xla_ms / self.fused_ms


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    information = pathlib.Path("/proc/cpuinfo")
    names = (
        re.findall(r"model name\s*: (.*)", information.read_text()) if information.exists() else []
    )
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = os.cpu_count() if affinity is None else len(affinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def allocators() -> tuple[str, ...]:
    """The allocators that `measure` uses: "default", and "jemalloc" where it is installed."""
    usable = sys.platform.startswith("linux") and ctypes.util.find_library("jemalloc") is not None
    return ("default", "jemalloc") if usable else ("default",)


def count(quick: bool) -> int:
    """How many speeds `measure` yields."""
    return len(allocators()) * len(QUICK_SITES if quick else SITES)


def measure(quick: bool) -> Iterator[SiteSpeed]:
    """Yields the speed of one site after another, measured in a process for each allocator."""
    command = [sys.executable, __file__, *(["--quick"] if quick else [])]
    for allocator in allocators():
        environment = dict(os.environ)
        if allocator == "jemalloc":
            preloaded = [ctypes.util.find_library("jemalloc"), os.environ.get("LD_PRELOAD")]
            environment["LD_PRELOAD"] = ":".join(filter(None, preloaded))
            environment["MALLOC_CONF"] = _MALLOC_CONF
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield SiteSpeed(**json.loads(line), allocator=allocator)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)


def plain(x: jax.Array, z: jax.Array | None, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """What XLA compiles: Flax's BatchNorm, and the addition and the ReLU after it."""
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": jnp.zeros_like(bias), "var": jnp.ones_like(bias)},
    }
    layer = nn.BatchNorm(use_running_average=False)
    y, _ = layer.apply(variables, x, mutable=["batch_stats"])
    return nn.relu(y if z is None else y + z)


def fused(x: jax.Array, z: jax.Array | None, scale: jax.Array, bias: jax.Array) -> jax.Array:
    if z is None:
        return jax_bnar.bn_relu(x, scale, bias).y
    return jax_bnar.bn_add_relu(x, z, scale, bias).y


def operands(site: Site, batch: int) -> tuple[Any, ...]:
    numbers = np.random.default_rng(0)
    shape = (batch, site.size, site.size, site.channels)
    x, z = (numbers.standard_normal(shape, np.float32) for _ in range(2))
    ones = np.ones(site.channels, np.float32)
    return x, z if site.has_residual else None, ones, 0 * ones


def main(quick: bool) -> None:
    batch = QUICK_BATCH if quick else BATCH
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for site in QUICK_SITES if quick else SITES:
        compare = jax_bnar.benchmark(
            plain, fused=fused, rounds=rounds, min_sample_ms=5, progress=False
        )
        report = compare(*operands(site, batch))
        median_ms = {
            measurement.name: measurement.median_ms
            for measurement in report.measurements
            if measurement.what == "forward + backward"
        }
        speed = {
            "site": site.label,
            "batch": batch,
            "fused_ms": median_ms["fused"],
            "xla_ms": median_ms["plain"],
        }
        print(json.dumps(speed), flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
