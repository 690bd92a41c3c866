"""Times BatchNorm-Add-ReLU with 2^10 to 2^28 elements, forward and step.

python -m benchmarks.sites.sizes --output benchmarks/results/NAME.json

Small arrays show the fixed cost of a call: JAX's dispatch, and the FFI call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import Contention, print_warning
from benchmarks.common.document import begin, finish
from benchmarks.common.isa import IsaName
from benchmarks.common.json_file import write_json
from benchmarks.common.sites import Site
from benchmarks.sites import checked
from benchmarks.sites.peers import PeerName
from benchmarks.sites.problem import DType, itemsize, make_problem
from jax_bnar._benchmark.timing import interleave

CHANNELS: Final = 64
# Small shapes that occur in tests, in small networks and after global pooling.
NAMED_SHAPES: Final = ((32, 16), (256, 256), (32, 8, 8, 64), (128, 32, 32, 16))


@dataclass(frozen=True)
class Options:
    """Times BatchNorm-Add-ReLU from small to large arrays, forward and forward + backward."""

    dtype: tuple[DType, ...] = ("float32", "bfloat16")
    smallest: int = 10
    """log2 of the smallest number of elements; it increases in steps of 2."""
    largest: int = 28
    largest_mib: int = 512
    """Arrays above this are left out: a step needs about 20 times as much memory."""
    peers: tuple[PeerName, ...] = ("ours", "flax", "torch")
    rounds: int = 7
    min_sample_ms: float = 20.0
    """Minimum length of a sample; shorter calls are repeated within it."""
    isa: IsaName | None = None
    """The best instruction set that all peers may use, as in `benchmarks.sites.run`."""
    output: Path | None = None
    """JSON file for the results, updated after each size."""


def shapes(options: Options, dtype: DType) -> Iterator[tuple[int, ...]]:
    for exponent in range(options.smallest, options.largest + 1, 2):
        if 2**exponent * itemsize(dtype) <= options.largest_mib << 20:
            # Images of at most 32x32, and as many of them as needed.
            side = 2 ** min(5, (exponent - 6) // 2)
            yield (2**exponent // (CHANNELS * side**2), side, side, CHANNELS)
    yield from NAMED_SHAPES


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    if 2**options.smallest < CHANNELS:
        raise SystemExit(
            f"--smallest {options.smallest} is too small: arrays have 64 channels, 2^6."
        )
    console = Console(width=80)
    document = begin(options, options.peers) | {"runs": []}
    for dtype in options.dtype:
        run: dict[str, Any] = {"dtype": dtype, "form": "bn_add_relu", "sizes": []}
        document["runs"].append(run)
        for shape in shapes(options, dtype):
            run["sizes"].append(measure(shape, dtype, options))
            console.print(_line(run["sizes"][-1], dtype))
            if options.output is not None:
                write_json(options.output, document)
        console.print(table(run))
        print_warning((size["contention"] for size in run["sizes"]), console)
    finish(document, options, console)
    return document


def measure(shape: tuple[int, ...], dtype: DType, options: Options) -> dict[str, Any]:
    """Checks every peer's results, then times their forward passes and steps in turn."""
    batch, *middle, channels = shape
    height, width = middle or (1, 1)
    problem = make_problem(Site(height, width, channels, "bn_add_relu"), batch, dtype)
    # The tolerances are for the sites of ResNet-50. PyTorch 2.13 adds up in float32, and with 2^21
    # elements in a channel its y is off by 1.6e-4 in norm.
    steps, unavailable = checked.build(options.peers, problem, leave_out_inaccurate=True)
    del problem
    settings = {"rounds": options.rounds, "min_sample_ms": options.min_sample_ms}
    contention = Contention()

    def timed(runs: dict[Any, Any]) -> dict[str, Any]:
        timings = interleave(runs, **settings)
        return {name: timing.as_dict() for name, timing in timings.items()}

    return {
        "shape": list(shape),
        "elements": batch * height * width * channels,
        "forward": timed({name: step.forward for name, step in steps.items()}),
        "step": timed({name: step.run for name, step in steps.items()}),
        "contention": contention.share(),
        "unavailable": unavailable,
    }


def _line(size: dict[str, Any], dtype: str) -> str:
    times = ", ".join(
        f"{name} {timing['median_ms'] * 1e3:.0f} us" for name, timing in size["step"].items()
    )
    missing = "".join(f"; {name}: {why}" for name, why in size["unavailable"].items())
    return f"{dtype} {'x'.join(map(str, size['shape']))}: {times} a step{missing}"


def names_of(run: dict[str, Any]) -> list[str]:
    """The peers that were measured at any size, in the order in which they were named."""
    return list(dict.fromkeys(name for size in run["sizes"] for name in size["step"]))


def table(run: dict[str, Any]) -> Table:
    """The ratios of each peer's median times to those of jax_bnar."""
    others = [name for name in names_of(run) if name != "ours"]
    result = Table("shape", "forward us", "step us", title=f"{run['dtype']}: time over ours")
    for name in others:
        result.add_column(f"{name} fwd", justify="right")
        result.add_column(f"{name} step", justify="right")
    for size in run["sizes"]:
        parts = [
            {name: timing["median_ms"] for name, timing in size[part].items()}
            for part in ("forward", "step")
        ]
        cells = [f"{times['ours'] * 1e3:.0f}" if "ours" in times else "-" for times in parts]
        for name in others:
            for times in parts:
                both = {name, "ours"} <= times.keys()
                cells.append(f"{times[name] / times['ours']:.2f}" if both else "-")
        result.add_row("x".join(map(str, size["shape"])), *cells)
    return result


if __name__ == "__main__":
    main()
