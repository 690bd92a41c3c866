"""Turns hardware counters of our kernels into rows, by site, and into text.

ncu lists kernels in the order of their launch, and the program says how many launches of which
kernel each site made.

The minimum that a pass moves is one read of x (and of z, and of dy) and one write of each result,
with a bit mask for the ReLU of a join, whatever is saved for backward; forward and backward add up
to `sites.one_read_bytes`. Where one kernel does a pass, `planned_bytes` is what the planner expects
memory to move, `planned_bytes_again` the part of it that L2 should have lost, and `l2_bytes_hit`
what L2 had of all that was read. If a pass takes two kernels, their ratios add up to the ratio of
the pass. What is still in L2 when a kernel ends does not count as written, so a ratio may be below
1.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.common.sites import Site
from benchmarks.gpu.ncu import COUNTERS, STALLS
from benchmarks.gpu.ncu_csv import Kernel

_SECTOR_BYTES: Final = 32
# Maps names in targets.cuda_launches() to (function, pass), in the order in which a step launches
# them.
KERNELS: Final = {
    "Forward": ("ForwardKernel", "forward"),
    "Statistics": ("StatisticsKernel", "forward"),
    "Normalise": ("NormaliseKernel", "forward"),
    "NormaliseFlat": ("NormaliseFlatKernel", "forward"),
    "PackMask": ("PackMaskKernel", "forward"),
    "Backward": ("BackwardKernel", "backward"),
    "BackwardReduce": ("ReduceKernel", "backward"),
    "BackwardApply": ("ApplyKernel", "backward"),
    "DualStatistics": ("DualStatisticsKernel", "forward"),
    "DualNormalise": ("DualNormaliseKernel", "forward"),
    "DualBackwardReduce": ("DualReduceKernel", "backward"),
    "DualBackwardApply": ("DualApplyKernel", "backward"),
}


def minimum_bytes(site: Site, batch: int, itemsize: int) -> dict[str, int]:
    """Returns the minimum of each pass, at one occurrence of the site."""
    elements = site.elements(batch)
    joins = site.form == "bn_add_relu"
    mask = elements // 8 if joins else 0
    return {
        "forward": (3 if joins else 2) * elements * itemsize + mask,  # x, [z], y
        "backward": (4 if joins else 3) * elements * itemsize + mask,  # dy, x, dx, [dz]
    }


def make_rows(
    sites: Sequence[Mapping[str, Any]], kernels: Iterable[Kernel]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a row for each launch that the program counted, and where ncu's list differs."""
    functions = {function for function, _ in KERNELS.values()}
    # ncu may leave out the namespace of a name that it simplifies.
    left = deque(k for k in kernels if k.function in functions or "jax_bnar" in k.signature)
    rows, problems = [], []
    for site in sites:
        for function, direction, strategy in _expected(site["launches"]):
            found = left.popleft() if left and left[0].function == function else None
            if found is None:
                following = left[0].function if left else "nothing"
                problems.append(
                    f"{site['site']}: ncu has no counters of {function}, but {following} follows"
                )
            rows.append(_row(site, function, direction, strategy, found))
    if left:
        rows += [_row(None, kernel.function, None, None, kernel) for kernel in left]
        problems.append(f"the program launched {len(left)} fewer of our kernels than ncu has")
    if not rows:
        problems.append("no kernel of ours was launched, though each site launches at least two")
    elif problems:
        problems.append("so it is not certain which site the counters belong to")
    return rows, problems


def rows_without_kernels(sites: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a dry run, in which no kernel of ours runs."""
    return [
        _row(site, None, direction, None, None)
        for site in sites
        for direction in ("forward", "backward")
    ]


def _expected(launches: Mapping[str, int]) -> Iterator[tuple[str, str | None, str]]:
    """Yields (function, pass, strategy) of each launch."""
    order = {name: index for index, name in enumerate(KERNELS)}
    names = [key.partition(" ")[::2] for key, count in launches.items() for _ in range(count)]
    for name, strategy in sorted(names, key=lambda pair: order.get(pair[0], len(order))):
        function, direction = KERNELS.get(name, (f"{name}Kernel", None))
        yield function, direction, strategy


def _row(
    site: Mapping[str, Any] | None,
    function: str | None,
    direction: str | None,
    strategy: str | None,
    kernel: Kernel | None,
) -> dict[str, Any]:
    keys = ("site", "count", "batch", "dtype")
    row: dict[str, Any] = {key: None if site is None else site[key] for key in keys}
    least = None if site is None or direction is None else site["minimum_bytes"][direction]
    row |= {"pass": direction, "kernel": function, "strategy": strategy, "minimum_bytes": least}
    planned = _planned(site, direction, strategy)
    row |= {f"planned_{name}": value for name, value in planned.items()}
    if kernel is None:
        return row
    counters = {field: kernel.metrics.get(metric) for field, metric in COUNTERS.items()}
    seconds = counters.pop("seconds")
    read, written = counters["dram_bytes_read"], counters["dram_bytes_written"]
    dram = None if read is None or written is None else read + written
    hit = counters["l2_sectors_read_hit"]
    stalls = {
        reason: kernel.metrics[metric]
        for reason, metric in STALLS.items()
        if metric in kernel.metrics
    }
    return row | {
        "signature": kernel.signature,
        "grid": list(kernel.grid),
        "block": list(kernel.block),
        "milliseconds": None if seconds is None else seconds * 1e3,
        "dram_bytes": dram,
        "dram_bytes_over_minimum": None if dram is None or not least else dram / least,
        "dram_bytes_over_planned": (
            None if dram is None or "bytes" not in planned else dram / planned["bytes"]
        ),
        "l2_bytes_hit": None if hit is None else _SECTOR_BYTES * hit,
        "bytes_per_s": None if dram is None or not seconds else dram / seconds,
        **counters,
        "stalls": dict(sorted(stalls.items(), key=lambda item: -item[1])),
    }


def _planned(
    site: Mapping[str, Any] | None, direction: str | None, strategy: str | None
) -> Mapping[str, float]:
    """Empty for a device that the model does not know, and where two kernels share a pass."""
    if site is None or direction is None or strategy in (None, "two_kernels"):
        return {}
    return (site.get("planned") or {}).get(direction, {})


def summarise(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "counters: ms, bytes of memory over the least of the pass and over the plan's, GB/s,"
        " warps stalled per issue"
    )
    for row in rows:
        stalls = list(row.get("stalls", {}).items())[:2]
        numbers = (
            _text(row.get("milliseconds"), 9, 3),
            _text(row.get("dram_bytes_over_minimum"), 6, 2),
            _text(row.get("dram_bytes_over_planned"), 6, 2),
            _text(row.get("bytes_per_s"), 6, 0, unit=1e9),
        )
        names = (
            row["site"] or "of no known site",
            row["kernel"] or row["pass"],
            row["strategy"],
            ", ".join(f"{reason} {warps:.1f}" for reason, warps in stalls),
        )
        yield f"  {' '.join(numbers)}  {'  '.join(name for name in names if name)}"


def _text(value: float | None, width: int, digits: int, unit: float = 1.0) -> str:
    return "-".rjust(width) if value is None else f"{value / unit:{width}.{digits}f}"
