"""Puts what `make gpu` measured next to what the model predicts."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu import table
from benchmarks.gpu.model.devices import DEVICES, DeviceName


def measured_device(path: Path) -> DeviceName | None:
    """The device of these results, or None if they do not say.

    Raises:
        ValueError: the model does not know it.
    """
    for result in _results(path):
        if result.get("family") == "jax" and (kind := result.get("device", {}).get("kind")):
            words = re.split(r"\W+", kind.lower())
            for name in DEVICES:
                if name in words:
                    return name
            raise ValueError(
                f"{path} was measured on {kind!r}, which the model does not know; pass --device"
                f" with one of {', '.join(DEVICES)}."
            )
    return None


def add_measured(document: dict[str, Any], path: Path) -> None:
    """Adds `measured_us` to the sites that the results have, and `measured_ms` to the sum.

    `path` is a summary.json of `make gpu`, or the JSON of its step benchmark_jax. The sum is None
    unless every site was measured.

    Raises:
        ValueError: the file has no time of the same batch size, dtype and `save`.
    """
    batch, dtype, save = document["batch"], document["dtype"], document["save"]
    times = {
        (row["site"], row["peer"]): row["median_ms"] * 1e3
        for row in table.rows_of_results(_results(path))
        if (row["batch"], row["dtype"]) == (batch, dtype)
    }
    sites = document["sites"]
    for site in sites:
        # Where no residual is added there is no mask, but there was one in older results.
        masked = save == "mask" and site["site"].endswith("bn_add_relu")
        site["measured_us"] = times.get((site["site"], "ours_mask" if masked else "ours"))
    if all(site["measured_us"] is None for site in sites):
        raise ValueError(
            f"{path} has no time of jax_bnar at batch {batch} in {dtype}: measure it with"
            f" `make gpu GPU_ARGS='-- --batch {batch} --dtype {dtype}'`, or ask the model for"
            " what was measured."
        )
    complete = all(site["measured_us"] is not None for site in sites)
    document["measured_ms"] = (
        sum(site["count"] * site["measured_us"] for site in sites) / 1e3 if complete else None
    )


def _results(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    return [document] if "rows" in document else list(table.results_of(document))
