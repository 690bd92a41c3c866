"""Predicts the time of the CUDA kernels at the sites of ResNet-50, on the CPU.

python -m benchmarks.gpu.model --device h200 --batch 256 --dtype bf16 --save mask
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import tyro
from rich.console import Console

from benchmarks.common.sites import RESNET50_SITES, RESNET50_SITES_WITH_DUAL_JOINS
from benchmarks.gpu.model import report
from benchmarks.gpu.model.devices import DEVICES, Device, DeviceName
from benchmarks.gpu.model.kinds import Save
from benchmarks.gpu.model.measured import add_measured, measured_device
from benchmarks.gpu.model.predict import (
    Assumptions,
    constants_of,
    measured_constants,
    predict,
)
from benchmarks.gpu.model.range import over_the_range, print_range
from benchmarks.sites.problem import DType

_DTYPES: Final[dict[str, DType]] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Options:
    """Predicts the time of the CUDA kernels at the BatchNorm sites of ResNet-50."""

    device: DeviceName | None = None
    """By default the one that was measured, or an H200."""
    batch: int = 256
    dtype: Literal["bf16", "f16", "f32"] = "bf16"
    save: Save = "mask"
    json: bool = False
    """Print JSON: sum_ms, floor_ms and sites."""
    measured: Path | None = None
    """A summary.json of `make gpu`: adds the measured times."""
    strategy: Literal["auto", "on_chip", "cluster", "two_kernels"] = "auto"
    slab_channels: Literal[0, 8, 16, 32, 64, 128, 256] = 0
    teams: int = 0
    """How many teams of blocks share the device; 0: the planner's choice."""
    dual: bool = False
    """The four joins after a shortcut's BatchNorm as one operation with two inputs."""
    constants: tuple[str, ...] = ()
    """Constants of cuda/host/cost.h to replace, such as barrier=3 or kernel_share=0.97."""
    measured_constants: Path | None = None
    """build/gpu/micro.json of `make gpu`: replaces the constants that were measured."""
    range: bool = False
    """Print instead what the sum is over the range of each constant that is uncertain."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        return run(options)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def run(options: Options) -> dict[str, Any]:
    if options.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {options.batch}.")
    if options.range:
        return run_range(options)
    measured = options.measured_constants
    assumptions = Assumptions(
        {
            **({} if measured is None else measured_constants(measured)),
            **constants_of(options.constants),
        },
        options.strategy,
        options.slab_channels,
        options.teams,
    )
    document = predict(
        _device(options),
        options.batch,
        _DTYPES[options.dtype],
        options.save,
        assumptions,
        RESNET50_SITES_WITH_DUAL_JOINS if options.dual else RESNET50_SITES,
    )
    if options.measured is not None:
        add_measured(document, options.measured)
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        report.print_prediction(document, Console())
    return document


def _device(options: Options) -> Device:
    name = options.device
    if name is None and options.measured is not None:
        name = measured_device(options.measured)
    return DEVICES[name or "h200"]


def run_range(options: Options) -> dict[str, Any]:
    fixed = dataclasses.replace(
        Options(), device=options.device, batch=options.batch, dtype=options.dtype,
        save=options.save, json=options.json, range=True,
    )  # fmt: skip
    if options != fixed:
        raise ValueError("--range takes only --device, --batch, --dtype, --save and --json.")
    device, dtype = _device(options), _DTYPES[options.dtype]
    rows = over_the_range(device, options.batch, dtype, options.save)
    document = {
        "modelled": True, "device": device.title, "batch": options.batch, "dtype": dtype,
        "save": options.save, "range": rows,
    }  # fmt: skip
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        title = (
            f"MODELLED, not measured: {device.title}, {dtype}, batch {options.batch},"
            f' save="{options.save}"'
        )
        print_range(rows, title, Console())
    return document


if __name__ == "__main__":
    main()
