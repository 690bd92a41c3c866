"""What the planner expects of the memory at a site, to be held against the counters."""

import re

from benchmarks.common.sites import Site
from benchmarks.gpu.model.devices import DEVICES
from benchmarks.gpu.model.kinds import Save, directions
from benchmarks.gpu.model.predict import Assumptions, predict_direction
from benchmarks.sites.problem import DType


def planned_bytes(
    device_kind: str, site: Site, batch: int, dtype: DType, save: Save, strategy: str
) -> dict[str, dict[str, float]] | None:
    """`bytes` that memory moves in each pass, and `bytes_again`, those that L2 has lost.

    None for a device that the model does not know.
    """
    found = (d for name, d in DEVICES.items() if re.search(rf"\b{name}\b", device_kind, re.I))
    device = next(found, None)
    if device is None:
        return None
    shape = (1, batch * site.height * site.width, site.channels, 1)
    planned = {}
    for name, direction in directions(site, dtype, save).items():
        plan = predict_direction(shape, dtype, direction, device, Assumptions(strategy=strategy))
        planned[name] = {key: plan[key] for key in ("bytes", "bytes_again")}
    return planned
