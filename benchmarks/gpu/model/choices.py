"""Compares the planner's choices, and the times of the model, with plans that were timed.

python -m benchmarks.gpu.model.choices

`benchmarks/results/gpu-plans-h200.json` has the times of an H200 for 12 sites of ResNet-50 in
bfloat16, forward and backward, at three batch sizes, each with several plans, as
`benchmarks.gpu.timed_plans` measures them. The constants of cuda/host/cost.h were fitted to them.
`--constants` tries others.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.model.devices import DEVICES
from benchmarks.gpu.model.kinds import directions
from benchmarks.gpu.model.predict import Assumptions, constants_of, predict_direction
from benchmarks.gpu.timed_plans.cases import SITES, name_of
from benchmarks.sites.problem import DType

MEASURED: Final = Path(__file__).parents[2] / "results" / "gpu-plans-h200.json"
_DEVICE: Final = DEVICES["h200"]
_SITES: Final = {name_of(site): site for site in SITES}
_PLAN: Final = ("strategy", "slab_channels", "team", "teams")


def _predict(row: Mapping[str, Any], dtype: DType, assumptions: Assumptions) -> dict[str, Any]:
    """What the model says of the case of a row: a site, a batch size and a direction."""
    site = _SITES[row["site"]]
    shape = (1, row["batch"] * site.height * site.width, site.channels, 1)
    direction = directions(site, dtype, "mask")[row["direction"]]
    return predict_direction(shape, dtype, direction, _DEVICE, assumptions)


def _is(row: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    kept = min(1.0, row["tiles_kept"] / row["tiles"])
    return all(row[name] == plan[name] for name in _PLAN) and kept == plan["kept_share"]


def compare(measured: Mapping[str, Any], constants: Mapping[str, float]) -> dict[str, Any]:
    """How much the choices lose by batch size, and how far the model is off by strategy.

    `lost` compares the weighted sums of two measured times: that of the plan that the planner
    chooses, and that of the best one. A case whose choice was not timed counts as `unmeasured`
    instead. `error` is the root mean square of the logarithm of predicted over measured times, of
    the plans that the planner makes if it is told their strategy. It takes no cluster whose slab
    exceeds its shared memory, so these do not count.
    """
    dtype = measured["dtype"]
    # The sums alone have no choice.
    rows = [row for row in measured["rows"] if row["direction"] in ("forward", "backward")]
    cases = defaultdict(list)
    for row in rows:
        cases[row["site"], row["batch"], row["direction"]].append(row)
    losses: dict[int, dict[str, float]] = defaultdict(
        lambda: {"cases": 0, "unmeasured": 0, "chosen_us": 0.0, "best_us": 0.0}
    )
    for (site, batch, _), case in cases.items():
        chosen = _predict(case[0], dtype, Assumptions(constants))
        times = [row["us"] for row in case if _is(row, chosen)]
        of_batch = losses[batch]
        of_batch["cases"] += 1
        if times:
            of_batch["chosen_us"] += _SITES[site].count * min(times)
            of_batch["best_us"] += _SITES[site].count * min(row["us"] for row in case)
        else:
            of_batch["unmeasured"] += 1
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["strategy"] == "cluster" and row["tiles"] > row["tiles_kept"]:
            continue
        # Each slab has a cluster of its own.
        teams = row["teams"] if row["strategy"] == "on_chip" else 0
        plan = _predict(
            row, dtype, Assumptions(constants, row["strategy"], row["slab_channels"], teams)
        )
        if _is(row, plan):
            errors[row["strategy"]].append(math.log(plan["predicted_us"] / row["us"]))
    return {
        "batches": {
            batch: {**one, "lost": one["chosen_us"] / one["best_us"] - 1}
            for batch, one in sorted(losses.items(), reverse=True)
        },
        "strategies": {
            strategy: {
                "plans": len(logs),
                "error": math.sqrt(sum(log * log for log in logs) / len(logs)),
            }
            for strategy, logs in sorted(errors.items())
        },
    }


def _print(found: Mapping[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for head in ("batch", " cases", " unmeasured", " ms, chosen", " ms, best", " lost"):
        table.add_column(head, justify="right")
    for batch, one in found["batches"].items():
        table.add_row(
            str(batch),
            str(one["cases"]),
            str(one["unmeasured"]),
            *(f"{one[name] / 1e3:.2f}" for name in ("chosen_us", "best_us")),
            f"{one['lost']:.1%}",
        )
    console.print(table)
    for strategy, one in found["strategies"].items():
        console.print(
            f"{strategy}: the model is off by {one['error']:.0%} at {one['plans']} plans",
            highlight=False,
        )


@dataclass(frozen=True)
class Options:
    """Compares the planner's choices, and the times of the model, with plans that were timed."""

    measured: Path = MEASURED
    json: bool = False
    """Print JSON."""
    constants: tuple[str, ...] = ()
    """Constants of cuda/host/cost.h to replace, such as barrier=3."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    measured = json.loads(options.measured.read_text())
    try:
        found = compare(measured, constants_of(options.constants))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        _print(found, Console(file=sys.stdout))
    return found


if __name__ == "__main__":
    main()
