"""What plain Flax takes at least at each site, from the programs that XLA compiles for it.

`benchmarks.gpu.compiled.sites` has counted the kernels of these programs and their bytes. Here each
kernel moves its bytes at the rate of a copy, except those that L2 has kept (`share_of_l2`) from
the last large kernel before it, and costs as much to launch as one of ours. That favours XLA, whose
reductions do not reach the rate of a copy.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.model.devices import DEVICES, Device

COMPILED: Final = Path(__file__).parents[2] / "results" / "gpu-compiled-sites.json"


@functools.cache
def _runs() -> list[dict[str, Any]]:
    return json.loads(COMPILED.read_text())["runs"]


def predict(
    device: Device, batch: int, dtype: str, copy_rate: float, model: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """By site, forward and backward: `kernels`, the `bytes` of memory, and `predicted_us`.

    A copy moves `copy_rate` bytes in a microsecond, and `model` has the constants of
    cuda/host/cost.h. The result is empty for a device, a batch or a dtype that has not been
    compiled for.
    """
    kept = model["share_of_l2"] * device.attributes()["l2_bytes"]
    found = {}
    for run in _runs():
        if (DEVICES.get(run["gpu"]), run["batch"], run["dtype"]) != (device, batch, dtype):
            continue
        for site in run["sites"]:
            kernels = site["kernels"]
            moved = sum(each["bytes"] - min(kept, each["after"]) for each in kernels)
            found[site["site"]] = {
                "kernels": len(kernels),
                "bytes": moved,
                "predicted_us": moved / copy_rate + len(kernels) * model["kernel"],
            }
    return found


def sum_ms(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The milliseconds of all occurrences, or None if a site was not compiled."""
    if any(row["flax"] is None for row in rows):
        return None
    return sum(row["count"] * row["flax"]["predicted_us"] for row in rows) / 1e3
