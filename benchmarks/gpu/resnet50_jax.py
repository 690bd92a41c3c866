"""A training step of ResNet-50 on the GPU: fused BatchNorm against plain Flax, on the same JAX.

The step has batch size 256, bfloat16, NHWC, random pictures that are already on the device, and SGD
with Nesterov's momentum. The networks take turns; a sample is the wall-clock time of several steps,
which the host launches without waiting. `peak_bytes` is what XLA has planned. `device_peak_bytes`
is the most that the process has held so far: that of the first network, or of a later one if it is
larger. `layout_changes` are copies and transposes, in the compiled program, of arrays as large as
the smallest activation of the network; there should be none around our calls.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final, get_args

import jax

from benchmarks.common.hlo_text import layout_changes
from benchmarks.common.json_file import write_json
from benchmarks.gpu.device import describe_device
from benchmarks.gpu.launches import launched
from benchmarks.gpu.program import make_document, make_parser
from benchmarks.network.training_step import NORMS, DType, TrainingStep, check_losses

# The activations of the last stage, 7x7x512, as a share of the picture's pixels.
_SMALLEST_ACTIVATION: Final = 512 / 32**2
_WARM_UP_STEPS: Final = 3


def sample_ms(step: TrainingStep, steps: int) -> float:
    start = perf_counter()
    for _ in range(steps - 1):
        step.start()
    step.run()
    return (perf_counter() - start) * 1e3 / steps


def summarise(document: dict[str, Any]) -> list[str]:
    networks = document["networks"]
    batch, size = document["settings"]["batch"], document["settings"]["size"]
    lines = [f"ResNet-50 step under JAX, {batch} x {size}x{size}, {document['settings']['dtype']}:"]
    for name, network in networks.items():
        lines.append(
            f"  {network['median_ms']:9.2f}  ms  {network['images_per_s']:7.0f} images/s"
            f"  {network['peak_bytes'] / 2**20:7.0f} MiB"
            f"  {len(network['layout_changes'])} layout changes  {name}"
        )
    return lines


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
    # The fused networks come first, so that the plain one's peak does not hide theirs.
    parser.add_argument("--norms", nargs="+", choices=tuple(NORMS), default=list(NORMS))
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a sample")
    parser.add_argument("--stage-sizes", type=int, nargs="+", default=[3, 4, 6, 3])
    options = parser.parse_args(arguments)
    if options.platform == "cpu":
        options.batch, options.size, options.stage_sizes = 2, 32, [1]
        options.samples, options.steps = 2, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    end = time.monotonic() + options.seconds
    settings = ("batch", "size", "dtype", "stage_sizes", "steps")
    document = make_document(
        "resnet50_jax",
        options.platform,
        device=describe_device(),
        settings={name: getattr(options, name) for name in settings},
        networks={},
    )
    least = round(_SMALLEST_ACTIVATION * options.batch * options.size**2)
    networks: dict[str, dict[str, Any]] = document["networks"]
    steps: dict[str, TrainingStep] = {}
    for name in options.norms:
        begin = perf_counter()
        step = TrainingStep(name, options.size, options.batch, options.dtype, options.stage_sizes)
        seconds = perf_counter() - begin
        with launched() as kernels:
            loss = step.run()
        statistics = jax.local_devices()[0].memory_stats() or {}
        networks[name] = {
            "first_loss": loss,
            "seconds_to_compile": round(seconds, 1),
            "device_peak_bytes": statistics.get("peak_bytes_in_use"),
            "kernels": sorted(kernels),
            "layout_changes": layout_changes(step.program(), least),
            "samples_ms": [],
            **step.memory(),
        }
        steps[name] = step
        write_json(options.output, document)
        print(f"{name}: compiled in {seconds:.0f} s, first loss {loss:.3f}", flush=True)
    try:
        check_losses({name: of["first_loss"] for name, of in networks.items()}, options.dtype)
    except ValueError as error:
        document["errors"].append(str(error))
        write_json(options.output, document)
        print(error)
        return 1
    for step in steps.values():
        for _ in range(_WARM_UP_STEPS):
            step.run()
    for index in range(options.samples):
        if time.monotonic() > end:
            break
        first = index % len(options.norms)
        for name in options.norms[first:] + options.norms[:first]:
            networks[name]["samples_ms"].append(sample_ms(steps[name], options.steps))
        for network in networks.values():
            network["median_ms"] = median(network["samples_ms"])
            network["images_per_s"] = options.batch / network["median_ms"] * 1e3
        document["summary"] = summarise(document)
        document["complete"] = index + 1 == options.samples
        write_json(options.output, document)
    print("\n".join(document["summary"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
