"""A training step of ResNet-50 on the GPU under PyTorch: the peer of resnet50_jax.

It is torchvision's resnet50 in channels_last, with automatic mixed precision in bfloat16, SGD with
Nesterov's momentum in one fused kernel, and random pictures that are already on the device. `torch`
is eager, `torch_compile` has the step's network under torch.compile, and `torch_compile_graphs` the
same in the mode "reduce-overhead" (CUDA graphs). A sample is the wall-clock time of several steps,
which the host launches without waiting. `peak_bytes` is the most that PyTorch's allocator has
handed out.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch  # pyright: ignore[reportMissingImports]
import torchvision  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks.common.json_file import write_json
from benchmarks.gpu.program import make_document, make_parser
from benchmarks.gpu.torch_benchmark import describe

CLASSES: Final = 1000
# The mode that compiles slowest comes last.
MODES: Final[dict[str, dict[str, Any] | None]] = {
    "torch": None,
    "torch_compile": {},
    "torch_compile_graphs": {"mode": "reduce-overhead"},
}
_WARM_UP_STEPS: Final = 5


def make_step(mode: str, batch: int, size: int, device: str) -> Callable[[], torch.Tensor]:
    """A training step: a call runs it and returns the loss."""
    torch.manual_seed(0)
    network = torchvision.models.resnet50(num_classes=CLASSES)
    network = network.to(device=device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=device == "cuda"
    )
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=device)
    options = MODES[mode]
    forward: Any = network if options is None else torch.compile(network, **options)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    device = options.platform
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = perf_counter()
    step = make_step(mode, options.batch, options.size, device)
    first_loss = float(step())
    seconds = perf_counter() - begin
    for _ in range(_WARM_UP_STEPS):
        step()
    samples = []
    for _ in range(options.samples):
        synchronise(device)
        start = perf_counter()
        for _ in range(options.steps):
            step()
        synchronise(device)
        samples.append((perf_counter() - start) * 1e3 / options.steps)
    return {
        "first_loss": first_loss,
        "seconds_to_compile": round(seconds, 1),
        "samples_ms": samples,
        "median_ms": median(samples),
        "images_per_s": options.batch / median(samples) * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def summarise(document: dict[str, Any]) -> list[str]:
    batch, size = document["settings"]["batch"], document["settings"]["size"]
    lines = [f"ResNet-50 step under PyTorch, {batch} x {size}x{size}, AMP in bfloat16:"]
    for mode, network in document["networks"].items():
        lines.append(
            f"  {network['median_ms']:9.2f}  ms  {network['images_per_s']:7.0f} images/s"
            f"  {(network['peak_bytes'] or 0) / 2**20:7.0f} MiB  {mode}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a sample")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    if options.platform == "cpu":
        options.batch, options.size, options.samples, options.steps = 2, 32, 2, 1
        options.modes = ["torch"]
    elif not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU.")
    # Users set this: cuDNN then searches once for the fastest algorithm of each convolution.
    torch.backends.cudnn.benchmark = True
    settings = {name: getattr(options, name) for name in ("batch", "size", "steps")}
    document = make_document(
        "resnet50_torch",
        options.platform,
        device=describe(options.platform),
        torchvision=torchvision.__version__,
        settings={**settings, "dtype": "bfloat16"},
        networks={},
    )
    for mode in options.modes:
        if time.monotonic() > end:
            break
        try:
            document["networks"][mode] = measure(mode, options)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:2000]}"
            print(f"FAILED {mode}: {text}", flush=True)
            document["errors"].append({"mode": mode, "error": text})
        document["summary"] = summarise(document)
        write_json(options.output, document)
    document["complete"] = len(document["networks"]) == len(options.modes)
    write_json(options.output, document)
    print("\n".join(document["summary"]))
    return 1 if document["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
