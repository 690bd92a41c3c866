"""Which strategy the planner takes where, and what would be lost without it.

python -m benchmarks.gpu.model.scan --device h200

Goes over shapes from a few rows to a few million and from 8 channels to 8192, in two dtypes,
forward and backward. A strategy that wins nowhere, or gains nothing where it wins, could be
removed.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common.kernels import planner
from benchmarks.gpu.model.devices import DEVICES, Device, DeviceName
from benchmarks.gpu.model.predict import constants_of, cost_model
from benchmarks.sites.problem import DType, itemsize

STRATEGIES: Final = ("cluster", "on_chip", "two_kernels")
DTYPES: Final[tuple[DType, ...]] = ("bfloat16", "float32")
ROWS: Final = tuple(2**power for power in range(3, 24))
CHANNELS: Final = tuple(2**power for power in range(3, 14))
# Larger arrays do not fit on a device next to their gradients.
_MOST_BYTES: Final = 8 << 30


def traffic_of(dtype: DType, direction: str) -> dict[str, float]:
    """With a residual and a mask, the form that moves most."""
    plan = planner()
    return (
        plan.cuda_forward_traffic(dtype, True, True)
        if direction == "forward"
        else plan.cuda_backward_traffic(dtype, "mask", True)
    )


def microseconds(
    shape: tuple[int, int, int, int],
    dtype: DType,
    direction: str,
    device: Device,
    model: Mapping[str, float],
) -> dict[str, float]:
    """What each strategy should take; one that the device lacks is left out."""
    found = {}
    for strategy in STRATEGIES:
        plan: dict[str, Any] = planner().cuda_plan(
            shape,
            dtype,
            traffic_of(dtype, direction),
            device.attributes(),
            dict(model),
            [dict(model)],
            strategy,
            0,
        )
        if plan["strategy"] == strategy:
            found[strategy] = plan["streaming_us"] + plan["waiting_us"] + plan["launching_us"]
    return found


def shapes(dtype: DType) -> Iterator[tuple[int, int, int, int]]:
    for rows in ROWS:
        for channels in CHANNELS:
            if rows * channels * itemsize(dtype) <= _MOST_BYTES:
                yield 1, rows, channels, 1


def scan(device: Device, constants: Mapping[str, float]) -> list[dict[str, Any]]:
    """For each strategy, dtype and direction: where it wins, and the most that it gains there.

    `gain` is the time that the next best strategy takes, over its own.
    """
    model = cost_model(constants)
    rows = []
    for dtype in DTYPES:
        for direction in ("forward", "backward"):
            cases = [
                (shape, microseconds(shape, dtype, direction, device, model))
                for shape in shapes(dtype)
            ]
            rows += [
                {"dtype": dtype, "direction": direction, **_wins(strategy, cases)}
                for strategy in STRATEGIES
            ]
    return rows


def _wins(
    strategy: str, cases: list[tuple[tuple[int, int, int, int], dict[str, float]]]
) -> dict[str, Any]:
    gains = {
        shape: min((us for name, us in times.items() if name != strategy), default=times[strategy])
        / times[strategy]
        for shape, times in cases
        if strategy in times and times[strategy] == min(times.values())
    }
    best = max(gains, key=lambda shape: gains[shape], default=None)
    return {
        "strategy": strategy,
        "shapes": len(cases),
        "wins": len(gains),
        "gain": None if best is None else gains[best],
        "most_at": None if best is None else {"rows": best[1], "channels": best[2]},
    }


@dataclass(frozen=True)
class Options:
    """Which strategy wins where."""

    device: DeviceName = "h200"
    json: bool = False
    """Print JSON."""
    constants: tuple[str, ...] = ()
    """Constants of cuda/host/cost.h to replace, such as barrier=3."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        rows = scan(DEVICES[options.device], constants_of(options.constants))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        _print(rows, DEVICES[options.device].title)
    return rows


def _print(rows: list[dict[str, Any]], device: str) -> None:
    table = Table(
        title=f"MODELLED, not measured: {device}, with a residual and a mask",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for head in ("dtype", "direction", "strategy"):
        table.add_column(head, no_wrap=True)
    for head in ("wins", "of", "gains up to", "at rows x channels"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        at = row["most_at"]
        table.add_row(
            row["dtype"], row["direction"], row["strategy"], str(row["wins"]), str(row["shapes"]),
            "" if at is None else f"{row['gain']:.2f}",
            "" if at is None else f"{at['rows']} x {at['channels']}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
