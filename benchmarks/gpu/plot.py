"""Draws what `make gpu` measured at the sites: the time of each peer, and the floor of one read.

python -m benchmarks.gpu.plot benchmarks/results/NAME.json benchmarks/results/NAME.svg
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.sites import RESNET50_SITES
from benchmarks.gpu import table
from benchmarks.sites import plot

# Each strategy by itself is only of interest for tuning.
PEERS: Final = ("ours", "ours_mask", "flax", "torch", "torch_compile", "cudnn")


def runs_of(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the sites of each batch size and dtype, as benchmarks.sites.plot draws them."""
    rows = list(table.rows_of_results(table.results_of(summary)))
    for step in summary["table"]:
        of_step = [row for row in rows if (row["batch"], row["dtype"]) == _key(step)]
        if step["copy_bytes_per_s"] is None:
            continue
        sites = []
        for site in RESNET50_SITES:
            of_site = [row for row in of_step if row["site"] == site.label]
            peers = {row["peer"]: row for row in of_site if row["peer"] in PEERS}
            if peers:
                sites.append(
                    {
                        "height": site.height, "width": site.width, "channels": site.channels,
                        "form": site.form, "count": site.count, "peers": peers,
                        "one_read_bytes": of_site[0]["one_read_bytes"],
                    }
                )  # fmt: skip
        names = [name for name in PEERS if any(name in site["peers"] for site in sites)]
        peers = {name: {"median_ms": step["peers"][name]["sum_ms"]} for name in names}
        yield {**step, "sites": sites, "step": {**step, "peers": peers}}


def _key(step: dict[str, Any]) -> tuple[int, str]:
    return step["batch"], step["dtype"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="summary.json of make gpu")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    summary = json.loads(options.results.read_text())
    runs = list(runs_of(summary))
    if not runs:
        raise SystemExit(
            f"{options.results} has no times of sites, or none of a copy to compare them with."
        )
    plot.save(runs, machine_of(summary), options.picture)
    print(f"wrote {options.picture}")


def machine_of(summary: dict[str, Any]) -> str:
    """Returns the device's name, and marks a dry run."""
    kinds = [
        result["device"]["kind"]
        for result in table.results_of(summary)
        if isinstance(result.get("device"), dict) and "kind" in result["device"]
    ]
    name = kinds[0] if kinds else "unknown device"
    return f"{name}, DRY RUN" if summary["dry_run"] else name


if __name__ == "__main__":
    main()
