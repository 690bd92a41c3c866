"""Measures all peers at one site or at several, and sums up the sites."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.common.contention import Contention
from benchmarks.common.copy_bandwidth import CopyRoof
from benchmarks.common.sites import Site, two_read_bytes, two_read_bytes_without_y
from benchmarks.sites import checked, peers
from benchmarks.sites.problem import DType, Layout, itemsize, make_problem
from jax_bnar._benchmark.timing import interleave


@dataclass(frozen=True)
class Settings:
    """How long to measure, and in which layout."""

    rounds: int
    min_sample_ms: float
    layout: Layout = "NHWC"


def measure_site(
    site: Site,
    batch: int,
    dtype: DType,
    names: Sequence[peers.PeerName],
    roof: CopyRoof,
    settings: Settings,
) -> dict[str, Any]:
    """Checks every peer's results, then times the peers and a copy in turn.

    Peers that cannot be measured here are listed with the reason, under "unavailable".
    """
    steps, unavailable = checked.build(
        names, make_problem(site, batch, dtype, layout=settings.layout)
    )
    copies: list[float] = []
    contention = Contention()
    timings = interleave(
        {name: step.run for name, step in steps.items()},
        rounds=settings.rounds,
        min_sample_ms=settings.min_sample_ms,
        each_round=lambda: copies.append(roof.measure()),
    )
    return {
        **asdict(site),
        "contention": contention.share(),
        "two_read_bytes": two_read_bytes(site, batch, itemsize(dtype)),
        "two_read_bytes_without_y": two_read_bytes_without_y(site, batch, itemsize(dtype)),
        "copy_bytes_per_s": median(copies),
        "peers": {
            name: timing.as_dict() | ({"details": details} if details else {})
            for name, timing in timings.items()
            for details in [dict(steps[name].details)]
        },
        "unavailable": unavailable,
    }


def measure_sites(
    sites: Sequence[Site],
    batch: int,
    dtype: DType,
    names: Sequence[peers.PeerName],
    roof: CopyRoof,
    settings: Settings,
    on_site: Callable[[Site], None],
) -> dict[str, Any]:
    """Measures the sites in one dtype, and their sum over a training step."""
    rows = []
    for site in sites:
        rows.append(measure_site(site, batch, dtype, names, roof, settings))
        on_site(site)
    return {
        "dtype": dtype,
        "batch": batch,
        "layout": settings.layout,
        "sites": rows,
        "step": sum_up(rows),
    }


def sum_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums the sites, weighted by their counts; the floors use the median copy bandwidth.

    A peer has a sum only if it was measured at all sites; otherwise it has a reason.
    """
    unavailable = {name: why for row in reversed(rows) for name, why in row["unavailable"].items()}
    bandwidth = median(row["copy_bytes_per_s"] for row in rows)

    def total(value: Callable[[dict[str, Any]], float]) -> float:
        return sum(row["count"] * value(row) for row in rows)

    bytes_saving_y = total(lambda row: row["two_read_bytes"])
    bytes_without_y = total(lambda row: row["two_read_bytes_without_y"])
    return {
        "count": total(lambda _: 1),
        "copy_bytes_per_s": bandwidth,
        "two_read_bytes": bytes_saving_y,
        "two_read_bytes_without_y": bytes_without_y,
        "two_read_floor_ms": bytes_saving_y / bandwidth * 1e3,
        "two_read_floor_ms_without_y": bytes_without_y / bandwidth * 1e3,
        "peers": {
            name: {
                "median_ms": total(lambda row, name=name: row["peers"][name]["median_ms"]),
                "min_ms": total(lambda row, name=name: row["peers"][name]["min_ms"]),
            }
            for name in rows[0]["peers"]
            if name not in unavailable
        },
        "unavailable": unavailable,
    }
