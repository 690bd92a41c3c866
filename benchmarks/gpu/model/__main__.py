"""Predicts the time of the CUDA kernels at the sites of ResNet-50, on the CPU.

python -m benchmarks.gpu.model --device h200 --batch 256 --dtype bf16 --save mask
"""

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
from benchmarks.gpu.model.devices import DEVICES, DeviceName
from benchmarks.gpu.model.kinds import Save
from benchmarks.gpu.model.measured import add_measured
from benchmarks.gpu.model.predict import Assumptions, constants_of, predict
from benchmarks.sites.problem import DType

_DTYPES: Final[dict[str, DType]] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Options:
    """Predicts the time of the CUDA kernels at the BatchNorm sites of ResNet-50."""

    device: DeviceName = "h200"
    batch: int = 256
    dtype: Literal["bf16", "f16", "f32"] = "bf16"
    save: Save = "mask"
    json: bool = False
    """Print JSON: sum_ms, floor_ms and sites."""
    measured: Path | None = None
    """A summary.json of `make gpu`: adds the measured times."""
    strategy: Literal["auto", "on_chip", "cluster", "two_kernels"] = "auto"
    slab_channels: Literal[0, 8, 16, 32, 64] = 0
    dual: bool = False
    """The four joins after a shortcut's BatchNorm as one operation with two inputs."""
    constants: tuple[str, ...] = ()
    """Constants of cuda/host/cost.h to replace, such as barrier=3 or kernel_share=0.97."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        return run(options)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def run(options: Options) -> dict[str, Any]:
    if options.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {options.batch}.")
    assumptions = Assumptions(
        constants_of(options.constants),
        options.strategy,
        options.slab_channels,
    )
    document = predict(
        DEVICES[options.device],
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


if __name__ == "__main__":
    main()
