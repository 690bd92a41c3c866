"""The program that ncu watches: forward and backward, once, at some sites of ResNet-50.

These are the heaviest sites and the most frequent ones.

    XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_enable_command_buffer= \
        ncu --profile-from-start off python -m benchmarks.gpu.counters_program --output sites.json

The profiler is on for one call of each step, after a call that has loaded the kernels. ncu runs a
kernel several times, and restores before each run what the last one wrote. For this it copies all
allocated memory, which must therefore not be the whole device. The output file says what the call
of each site launched, so that ncu's kernels can be told apart; it is written after each site.
`counters` starts this program.
"""

import argparse
import contextlib
import ctypes
import ctypes.util
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import jax

from benchmarks.common.json_file import write_json
from benchmarks.common.sites import RESNET50_SITES, Site, one_read_bytes, two_read_bytes_without_y
from benchmarks.gpu.chain import make_operands
from benchmarks.gpu.counter_rows import minimum_bytes
from benchmarks.gpu.jax_benchmark import STRATEGIES, shapes_of
from benchmarks.gpu.planned import planned_bytes
from benchmarks.gpu.program import make_parser
from benchmarks.gpu.work import Wave
from benchmarks.sites.peers import ours
from benchmarks.sites.problem import DType, itemsize
from jax_bnar._base.config import Save
from jax_bnar._kernels import targets

_HEAVIEST: Final = 5
# These come on top of the heaviest, since they occur 18 times in the network.
_FREQUENT: Final = ("28x28x128", "14x14x256")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
    parser.add_argument(
        "--sites", nargs="+",
        help=f"labels start with one of these (default: the {_HEAVIEST} heaviest,"
        f" {' and '.join(_FREQUENT)})",
    )  # fmt: skip
    parser.add_argument("--strategy", choices=("auto", *STRATEGIES), default="auto")
    parser.add_argument("--save", choices=("mask", "y"), default="mask")
    options = parser.parse_args(arguments)
    if options.platform == "cpu":
        options.batch, options.sites = 2, ["7x7x2048 bn_add_relu"]
    options.sites = heaviest_first(options.sites)
    if not options.sites:
        labels = ", ".join(site.label for site in RESNET50_SITES)
        parser.error(f"--sites fits none of: {labels}")
    return options


def heaviest_first(prefixes: Sequence[str] | None) -> list[Site]:
    """Selects sites, so that a deadline cuts off those that count least."""
    # One image, two bytes an element.
    sites = sorted(RESNET50_SITES, key=lambda site: -site.count * one_read_bytes(site, 1, 2))
    if prefixes is None:
        more = [site for site in sites[_HEAVIEST:] if site.label.startswith(_FREQUENT)]
        return sites[:_HEAVIEST] + more
    return [site for site in sites if site.label.startswith(tuple(prefixes))]


def load_cuda_runtime() -> ctypes.CDLL:
    """Loads the CUDA runtime: JAX's, a wheel's or the system's, which all reach the same driver."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in maps if "libcudart.so" in line}
    wheels = importlib.util.find_spec("nvidia")
    folders = [] if wheels is None else wheels.submodule_search_locations or []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libcudart.so*")]
    names = [*sorted(loaded), *map(str, sorted(found)), ctypes.util.find_library("cudart")]
    problems = []
    for name in names:
        if name is not None:
            try:
                return ctypes.CDLL(name)
            except OSError as error:
                problems.append(str(error))
    raise OSError(
        "no CUDA runtime (libcudart.so) to switch the profiler on with: neither loaded by JAX, nor"
        f" in a wheel, nor known to the linker; install nvidia-cuda-runtime. {problems}"
    )


@contextlib.contextmanager
def profiled(runtime: ctypes.CDLL | None) -> Iterator[None]:
    """Profiles what is launched inside; without a runtime it profiles nothing."""
    if runtime is not None and (error := runtime.cudaProfilerStart()):
        raise RuntimeError(f"cudaProfilerStart returned cudaError_t {error}, expected 0")
    try:
        yield
    finally:
        if runtime is not None:
            runtime.cudaProfilerStop()


def run_site(
    site: Site, wave: Wave, save: Save, runtime: ctypes.CDLL | None, entry: dict[str, Any]
) -> None:
    """Makes one call with the profiler on, and notes in `entry` what it launched."""
    sets, scale, bias = make_operands(shapes_of(site, wave, 1))
    x, z, dy = sets[0]
    operands = (x, z, scale, bias, dy)
    step = jax.jit(ours.gradient_step(ours.operator(site, save))).lower(*operands).compile()
    jax.block_until_ready(step(*operands))
    before = targets.cuda_launches()
    try:
        with profiled(runtime):
            jax.block_until_ready(step(*operands))
    finally:
        for name, count in targets.cuda_launches().items():
            if count > before.get(name, 0):
                entry["launches"][name] = count - before.get(name, 0)


def describe(site: Site, wave: Wave) -> dict[str, Any]:
    size = itemsize(wave.dtype)
    return {
        "site": site.label,
        "count": site.count,
        "batch": wave.batch,
        "dtype": wave.dtype,
        "one_read_bytes": one_read_bytes(site, wave.batch, size),
        "two_read_bytes": two_read_bytes_without_y(site, wave.batch, size),
        "minimum_bytes": minimum_bytes(site, wave.batch, size),
        "launches": {},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    begin = time.monotonic()
    options = parse(arguments)
    expected = "cpu" if options.platform == "cpu" else "gpu"
    if jax.default_backend() != expected:
        raise SystemExit(f"JAX runs on {jax.default_backend()}, expected {expected}.")
    # The kernels read this variable when they are launched.
    os.environ["JAX_BNAR_CUDA_STRATEGY"] = options.strategy
    runtime = None if options.platform == "cpu" else load_cuda_runtime()
    wave = Wave(options.batch, options.dtype, ("ours",))
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "strategy": options.strategy,
        "save": options.save,
        "complete": False,
        "sites": [],
        "errors": [],
    }
    for site in options.sites:
        if time.monotonic() - begin > options.seconds:
            break
        entry = describe(site, wave)
        entry["planned"] = planned_bytes(
            document["device"], site, wave.batch, wave.dtype, options.save, options.strategy
        )
        document["sites"].append(entry)
        try:
            run_site(site, wave, options.save, runtime, entry)
        except Exception as error:
            text = f"{site.label}: {type(error).__name__}: {str(error)[:2000]}"
            print(f"FAILED {text}", flush=True)
            document["errors"].append(text)
        document["complete"] = len(document["sites"]) == len(options.sites)
        write_json(options.output, document)
        print(f"{site.label}: {entry['launches']}", flush=True)
    return 1 if document["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
