"""What the model expects of each site, forward and backward, and of their sum."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.common.kernels import planner
from benchmarks.common.sites import RESNET50_SITES, Site
from benchmarks.gpu.model import flax
from benchmarks.gpu.model.devices import Device
from benchmarks.gpu.model.kinds import VECTOR, Direction, Save, directions
from benchmarks.sites.problem import DType, itemsize

# Written by .ci/cuda_instructions.py. The counts are those of sm_90, for every device.
INSTRUCTIONS: Final = Path(__file__).with_name("instructions.json")
_WARP: Final = 32

# What the planner knows of the constants that are replaced:
#   told    these constants, so that only the others remain uncertain;
#   built   nothing: the plans are those of the kernels as they are;
#   sure    all constants, so that the plan is the best one for them.
Planner = Literal["told", "built", "sure"]


@dataclass(frozen=True)
class Assumptions:
    """What the model may be told beside the device.

    Attributes:
        constants: constants of cuda/host/cost.h to replace, by name.
        strategy: "auto", or the strategy that every direction is forced to.
        slab_channels: 0, or the width of all slabs.
        teams: 0, or how many teams of blocks share the device.
        planner: what the planner knows of `constants`.
    """

    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    strategy: str = "auto"
    slab_channels: int = 0
    teams: int = 0
    planner: Planner = "told"


def measured_constants(path: Path) -> dict[str, float]:
    """The constants that the microbenchmark of `make gpu` has measured, from its JSON.

    Raises:
        ValueError: the file has none.
    """
    constants = json.loads(path.read_text()).get("constants")
    if not isinstance(constants, dict):
        raise ValueError(
            f"{path} has no `constants`: expected what the step `micro` of `make gpu` writes,"
            " build/gpu/micro.json."
        )
    return constants


def constants_of(texts: Sequence[str]) -> dict[str, float]:
    """Numbers by name, from texts such as "barrier=3".

    Raises:
        ValueError: a text has another form.
    """
    constants = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            constants[name] = float(value)
        except ValueError:
            raise ValueError(f"--constants takes NAME=NUMBER, got {text!r}.") from None
    return constants


def cost_model(constants: Mapping[str, float]) -> dict[str, float]:
    """The planner's constants, with some replaced.

    Raises:
        ValueError: there is no constant of that name.
    """
    defaults: dict[str, float] = planner().cuda_cost_model()
    for name in constants:
        if name not in defaults:
            raise ValueError(f"{name} is none of the constants {', '.join(defaults)}.")
    return {**defaults, **constants}


def planned_models(assumptions: Assumptions) -> list[dict[str, float]]:
    """The cost models of which the planner takes each for possible."""
    if assumptions.planner == "sure":
        return [cost_model(assumptions.constants)]
    models: list[dict[str, float]] = planner().cuda_planned_models()
    if assumptions.planner == "built":
        return models
    told = [{**model, **assumptions.constants} for model in models]
    return [model for index, model in enumerate(told) if model not in told[:index]]


def predict_direction(
    canonical_shape: tuple[int, int, int, int],
    dtype: DType,
    direction: Direction,
    device: Device,
    assumptions: Assumptions,
) -> dict[str, Any]:
    """One direction of one occurrence of a site.

    `streaming_us` is what memory and instructions take; `instructions_limit` says that the latter
    take longer than memory in one of the passes.
    """
    model = cost_model(assumptions.constants)
    traffic = direction.traffic
    strategy = direction.strategy if direction.strategy != "auto" else assumptions.strategy
    plan: dict[str, Any] = planner().cuda_plan(
        canonical_shape,
        dtype,
        traffic,
        device.attributes(),
        model,
        planned_models(assumptions),
        strategy,
        assumptions.slab_channels,
        assumptions.teams,
    )
    groups, rows, channels, inner = canonical_shape
    elements = groups * rows * channels * inner
    array = elements * itemsize(dtype)
    kept = min(1.0, plan["tiles_kept"] / max(1, plan["tiles"]))
    if plan["strategy"] == "two_kernels":
        kept = 0.0
    # Each pass takes as long as memory does, or as its instructions do.
    rate = plan["bytes"] / plan["streaming_us"]
    first = (traffic["arrays_kept"] + traffic["first"]) * array
    memory = (first / rate, (plan["bytes"] - first) / rate)
    cycles_per_us = 1e3 * device.clock_ghz * device.multiprocessors * plan["busy"]
    issued = model["instructions_per_cycle"] * cycles_per_us
    us_per_instruction = elements / (VECTOR * _WARP) / issued
    issue = tuple(
        (kept * shared + (1 - kept) * streamed) * us_per_instruction
        for shared, streamed in _instructions(dtype, direction, plan)
    )
    streaming = sum(map(max, memory, issue))
    predicted = streaming + plan["waiting_us"] + plan["launching_us"]
    floor = direction.floor * array / _copy_bytes_per_us(device, assumptions.constants)
    names = (
        "strategy", "slab_channels", "team", "teams", "bytes", "bytes_again", "rounds",
        "bytes_in_flight", "waiting_us", "launching_us",
    )  # fmt: skip
    return {
        **{name: plan[name] for name in names},
        "kept_share": kept,
        "streaming_us": streaming,
        "instructions_limit": streaming > sum(memory),
        "predicted_us": predicted,
        "floor_us": floor,
        "floor_share": floor / predicted,
    }


def _copy_bytes_per_us(device: Device, constants: Mapping[str, float]) -> float:
    return device.bytes_per_us * cost_model(constants)["copy_share"]


def _instructions(
    dtype: DType, direction: Direction, plan: Mapping[str, Any]
) -> list[tuple[float, float]]:
    """Instructions for a vector in both passes, in kept tiles and others; 0 if they are unknown."""
    counted = json.loads(INSTRUCTIONS.read_text())["loops"]
    loops = counted.get(dtype, {}) if plan["width"] > 1 else {}
    return [
        (loops.get(kept, 0.0), loops.get(streamed, 0.0))
        for kept, streamed in direction.loops(plan["strategy"] == "two_kernels")
    ]


def predict(
    device: Device,
    batch: int,
    dtype: DType,
    save: Save,
    assumptions: Assumptions | None = None,
    sites: Sequence[Site] = RESNET50_SITES,
) -> dict[str, Any]:
    """All sites and their sum, weighted by how often each occurs, as a JSON object."""
    assumptions = assumptions or Assumptions()
    model = cost_model(assumptions.constants)
    plain = flax.predict(
        device, batch, dtype, _copy_bytes_per_us(device, assumptions.constants), model
    )
    rows = []
    for site in sites:
        shape = (1, batch * site.height * site.width, site.channels, 1)
        predictions = {
            name: predict_direction(shape, dtype, direction, device, assumptions)
            for name, direction in directions(site, dtype, save).items()
        }
        predicted = sum(one["predicted_us"] for one in predictions.values())
        floor = sum(one["floor_us"] for one in predictions.values())
        rows.append(
            {
                "site": site.label,
                "count": site.count,
                "predicted_us": predicted,
                "floor_us": floor,
                "floor_share": floor / predicted,
                "flax": plain.get(site.label),
                **predictions,
            }
        )
    total = sum(row["count"] * row["predicted_us"] for row in rows) / 1e3
    floor_ms = sum(row["count"] * row["floor_us"] for row in rows) / 1e3
    instructions = json.loads(INSTRUCTIONS.read_text())
    return {
        "modelled": True,
        "device": device.title,
        "batch": batch,
        "dtype": dtype,
        "save": save,
        "constants": model,
        "copy_bytes_per_us": _copy_bytes_per_us(device, assumptions.constants),
        "instructions": {name: instructions[name] for name in ("architecture", "commit")},
        "sum_ms": total,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / total,
        "flax_ms": flax.sum_ms(rows),
        "sites": rows,
    }
