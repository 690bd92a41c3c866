"""What was measured, as text: the sites' rows summed over a step, and each program's summary."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from benchmarks.common.sites import RESNET50_SITES
from benchmarks.gpu.steps import StepRecord

# What other peers are held against: both ways to save the sign of the ReLU.
OURS: Final = ("ours", "ours_mask")
# Above this share, the host was hardly ahead of the device, and may be what was timed (chain.py).
HOST_BOUND: Final = 0.9


def results_of(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON that each command of a summary has written."""
    for record in summary["steps"]:
        for command in record["commands"]:
            if isinstance(command["result"], dict):
                yield command["result"]


def rows_of_results(results: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of sites. The name of a copy says which framework made it."""
    for result in results:
        family = result.get("family")
        for row in result.get("rows", ()) if family in ("jax", "torch") else ():
            yield {**row, "peer": f"{family}_copy" if row["peer"] == "copy" else row["peer"]}


def rows_of(records: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    """Rows of sites of all steps."""
    return rows_of_results(_results_of_records(records))


def merge(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Returns an object for each batch size and dtype.

    `sum_ms` weights each site with its count, over the sites that a peer has; `sites` says how many
    those are, because only sums over the same sites compare, and `host_bound` what part of the sum
    may have timed the host. The floors take the rate of the fastest copy: a small one takes as long
    as its launch. `slower_than` names, for each peer, the sites where it takes less time than
    `ours`, and those where it takes less than `ours_mask`.
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(records):
        groups[row["batch"], row["dtype"]].append(row)
    return [_merge(batch, dtype, rows) for (batch, dtype), rows in groups.items()]


def _merge(batch: int, dtype: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    peers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rates = []
    for row in rows:
        peers[row["peer"]].append(row)
        if "bytes" in row:
            rates.append(row["bytes"] / (row["median_ms"] / 1e3))
    bandwidth = max(rates, default=None)
    sites = {row["site"]: row for row in rows}
    totals = {
        name: sum(row["count"] * row[f"{name}_bytes"] for row in sites.values())
        for name in ("one_read", "two_read")
    }
    return {
        "batch": batch,
        "dtype": dtype,
        "sites": len(sites),
        "sites_of_the_network": len(RESNET50_SITES),
        "copy_bytes_per_s": bandwidth,
        **{
            f"{name}_floor_ms": None if bandwidth is None else total / bandwidth * 1e3
            for name, total in totals.items()
        },
        "peers": {
            peer: _sum(of_peer) for peer, of_peer in peers.items() if not peer.endswith("_copy")
        },
        "slower_than": _slower_than(rows),
    }


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def total(rows: Iterable[dict[str, Any]]) -> float:
        return sum(row["count"] * row["median_ms"] for row in rows)

    of_host = (row for row in rows if row.get("host_share", 0.0) > HOST_BOUND)
    sum_ms = total(rows)
    return {"sites": len(rows), "sum_ms": sum_ms, "host_bound": round(total(of_host) / sum_ms, 2)}


def _slower_than(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """For each peer that is not ours, the sites where it takes less time than each of OURS."""
    times = {(row["peer"], row["site"]): row["median_ms"] for row in rows}
    found: dict[str, dict[str, list[str]]] = {}
    for (peer, site), ms in times.items():
        if not peer.startswith("ours") and not peer.endswith("_copy"):
            of_peer = found.setdefault(peer, {name: [] for name in OURS})
            for name in OURS:
                if times.get((name, site), 0.0) > ms:
                    of_peer[name].append(site)
    return found


def summaries(records: Sequence[StepRecord]) -> Iterator[str]:
    """The lines that programs without rows of sites have written themselves."""
    for result in _results_of_records(records):
        yield from result.get("summary", ())


def _results_of_records(records: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    """The JSON that each command has written."""
    for record in records:
        for command in record.commands:
            if isinstance(command.result, dict):
                yield command.result


def render(records: Sequence[StepRecord]) -> Iterator[str]:
    for group in merge(records):
        yield (
            f"batch {group['batch']}, {group['dtype']}: {group['sites']} of"
            f" {group['sites_of_the_network']} sites, forward + backward, sum in ms"
        )
        if group["copy_bytes_per_s"]:
            yield (
                f"  {group['one_read_floor_ms']:9.3f}  floor, every tensor once, at the copy's"
                f" {group['copy_bytes_per_s'] / 1e9:.0f} GB/s"
            )
            yield f"  {group['two_read_floor_ms']:9.3f}  floor, x (and dy) read twice"
        for peer, total in sorted(group["peers"].items(), key=lambda item: item[1]["sum_ms"]):
            notes = [f"{total['sites']} sites only"] * (total["sites"] != group["sites"])
            if total["host_bound"] > 0:
                notes.append(f"{total['host_bound']:.0%} of it may be the host's time")
            in_brackets = f"  ({'; '.join(notes)})" if notes else ""
            yield f"  {total['sum_ms']:9.3f}  {peer}{in_brackets}"
        for peer, of_peer in group["slower_than"].items():
            for name, sites in of_peer.items():
                if sites:
                    yield f"  {name} is slower than {peer} at {', '.join(sites)}"
    yield from summaries(records)
