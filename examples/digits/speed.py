"""Speed of single BatchNorm sites of ResNet-50, forward and backward, ours against XLA.

These are a handful of the sites that `benchmarks/` measures in full, with the same operands and
timing code. They run in separate processes: with the default allocator, and if libjemalloc is
installed, on recycled memory, because fresh pages for large results cost both sides more than the
arithmetic.

    python examples/digits/speed.py [--quick]      prints one JSON object per site
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

# Last on the path: the root also contains the sources of jax_bnar, and an installed package (with
# kernels) must take precedence over them.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.common.environment import describe_environment
from benchmarks.common.sites import Site
from benchmarks.sites import launch, peers
from benchmarks.sites.problem import make_problem
from jax_bnar._benchmark import timing

SITES: Final = (
    Site(56, 56, 64, "bn_relu"),
    Site(56, 56, 256, "bn_add_relu"),
    Site(28, 28, 512, "bn_add_relu"),
    Site(14, 14, 1024, "bn_add_relu"),
    Site(7, 7, 2048, "bn_add_relu"),
)
BATCH: Final = 16
ROUNDS: Final = 11
QUICK_SITES: Final = (Site(14, 14, 256, "bn_relu"), Site(7, 7, 512, "bn_add_relu"))
QUICK_BATCH: Final = 2
QUICK_ROUNDS: Final = 3


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
    """The processor, how many of its cores are used, and the instruction set of the kernels."""
    environment = describe_environment()
    kernels = environment["jax_bnar_isa"]
    return ", ".join(
        [
            environment["cpu"],
            f"{environment['cores']} cores",
            f"kernels for {kernels}" if kernels else "no kernels",
        ]
    )


def allocators() -> tuple[str, ...]:
    """The allocators that `measure` uses: "default", and "jemalloc" where it is installed."""
    usable = sys.platform.startswith("linux") and launch.find_jemalloc() is not None
    return ("default", "jemalloc") if usable else ("default",)


def count(quick: bool) -> int:
    """How many speeds `measure` yields."""
    return len(allocators()) * len(QUICK_SITES if quick else SITES)


def measure(quick: bool) -> Iterator[SiteSpeed]:
    """Yields the speed of one site after another, measured in a process for each allocator."""
    command = [sys.executable, __file__, *(["--quick"] if quick else [])]
    for allocator in allocators():
        environment = launch.environment_for(allocator, os.environ, launch.find_jemalloc())
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield SiteSpeed(**json.loads(line), allocator=allocator)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)


def main(quick: bool) -> None:
    batch = QUICK_BATCH if quick else BATCH
    for site in QUICK_SITES if quick else SITES:
        problem = make_problem(site, batch, "float32")
        timings = timing.interleave(
            {name: peers.build(name, problem).run for name in ("ours", "flax")},
            rounds=QUICK_ROUNDS if quick else ROUNDS,
            min_sample_ms=5,
        )
        speed = {
            "site": site.label,
            "batch": batch,
            "fused_ms": timings["ours"].median_ms,
            "xla_ms": timings["flax"].median_ms,
        }
        print(json.dumps(speed), flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
