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
    peer = "ours_mask" if document["save"] == "mask" else "ours"
    key = (document["batch"], document["dtype"], peer)
    times = {
        row["site"]: row["median_ms"] * 1e3
        for row in table.rows_of_results(_results(path))
        if (row["batch"], row["dtype"], row["peer"]) == key
    }
    sites = document["sites"]
    if not any(site["site"] in times for site in sites):
        raise ValueError(
            f"{path} has no time of {peer} at batch {key[0]} in {key[1]}: measure it with"
            f" `make gpu GPU_ARGS='-- --batch {key[0]} --dtype {key[1]}'`, or ask the model for"
            " what was measured."
        )
    for site in sites:
        site["measured_us"] = times.get(site["site"])
    complete = all(site["measured_us"] is not None for site in sites)
    document["measured_ms"] = (
        sum(site["count"] * site["measured_us"] for site in sites) / 1e3 if complete else None
    )


def _results(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    return [document] if "rows" in document else list(table.results_of(document))
