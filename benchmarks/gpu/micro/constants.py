"""The constants of cuda/host/cost.h, from what main.cu has measured.

They are those about memory. The others were fitted to what whole kernels take, and mean more than
the messages, empty kernels, late blocks and contents of L2 that main.cu measures on their own,
which are among the findings.
"""

from collections.abc import Iterator
from typing import Any, Final

# Below this share of the best rate, requests under way are what limits it.
_LIMITED: Final = 0.7
_TWO_LINES: Final = 256
_LINE: Final = 128
_HALF_LINE: Final = 64
# Rows that lie apart: in those of 128 bytes, every piece of half a line is read next to the other.
_STRIDES: Final = (512, 2048)


def constants_of(document: dict[str, Any]) -> dict[str, float]:
    """The constants by name. Shares are at most 1."""
    device, rows = document["device"], document["measured"]
    (memcpy,) = _rates(rows, "memcpy")
    copy = _rate(rows, "copy", piece=_LINE, stride=_LINE)
    # Only writing is slower by lines, and reading as well by halves of them. The cost model takes
    # both as shares of the rate of wider rows.
    line_share = min(1.0, _share(rows, ("copy",), _LINE, _TWO_LINES))
    half_of_line = min(1.0, _share(rows, ("read", "copy"), _HALF_LINE, _LINE))
    return {
        "copy_share": min(1.0, memcpy / device["bytes_per_us"]),
        "kernel_share": min(1.0, copy / memcpy),
        "line_share": line_share,
        "narrow_share": half_of_line * line_share,
        "memory_latency": _latency(rows, device["multiprocessors"]),
    }


def findings(document: dict[str, Any]) -> Iterator[str]:
    """What else was measured, in lines: no constants, but each could change a kernel or a plan."""
    rows = document["measured"]
    for what in ("read", "copy"):
        for stride in sorted({row["stride"] for row in rows if row["what"] == what}):
            rates = [
                f"{row['piece']:.0f}: {row['bytes'] / row['us'] / 1e3:.0f}"
                for row in rows
                if row["what"] == what and row["stride"] == stride
            ]
            yield f"{what}, GB/s by bytes of a piece, a piece in {stride:.0f}: {', '.join(rates)}"
    flights = [
        f"{row['bytes_in_flight'] / 1024:.0f} KB: {row['bytes'] / row['us'] / 1e3:.0f}"
        for row in rows
        if row["what"] == "in_flight"
    ]
    yield f"read, GB/s by what a multiprocessor has in flight: {', '.join(flights)}"
    times = [
        f"{name} {_us(rows, f'messages_{name}'):.2f}" for name in ("warm", "cold", "prefetched")
    ]
    yield f"both messages of a round, us: {', '.join(times)}"
    late, median = _us(rows, "spread", "late_us"), _us(rows, "spread")
    yield f"the last of blocks with equal shares, us after their median: {late:.2f} of {median:.1f}"
    halves, lines = (_bytes_in_l2(rows, piece) for piece in (_HALF_LINE, _LINE))
    yield (
        f"L2 keeps {lines / 2**20:.0f} MiB of whole lines and {halves / 2**20:.0f} MiB of half"
        " lines (the model assumes half as many)"
    )
    kernels = [_of_kernel(row) for row in rows if row["what"] == "kernel"]
    yield f"a kernel that does nothing, in a graph, us: {', '.join(kernels)}"
    queries = [
        f"{row['what'].split()[1]} {row['us']:.1f}"
        for row in rows
        if row["what"].startswith("attribute ")
    ]
    yield f"an attribute of the device, us: {', '.join(queries)}"


def _of_kernel(row: dict[str, Any]) -> str:
    words = ["cooperative" if row["cooperative"] else "normal"]
    if row["shared_bytes"]:
        words.append(f"{row['shared_bytes'] / 1024:.0f} KB")
    if row["alternating"]:
        words.append("in turn with a plain one")
    return f"{' '.join(words)} {row['us']:.2f}"


def _rows(rows: list[dict[str, Any]], what: str, **numbers: float) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["what"] == what and all(row[name] == value for name, value in numbers.items())
    ]


def _rates(rows: list[dict[str, Any]], what: str, **numbers: float) -> list[float]:
    """Bytes a microsecond."""
    return [row["bytes"] / row["us"] for row in _rows(rows, what, **numbers)]


def _rate(rows: list[dict[str, Any]], what: str, **numbers: float) -> float:
    (rate,) = _rates(rows, what, **numbers)
    return rate


def _us(rows: list[dict[str, Any]], what: str, number: str = "us") -> float:
    (row,) = _rows(rows, what)
    return row[number]


def _share(rows: list[dict[str, Any]], whats: tuple[str, ...], piece: int, wider: int) -> float:
    """The rate for pieces that lie apart, as a share of that for wider ones."""
    shares = [
        _rate(rows, what, piece=piece, stride=stride)
        / _rate(rows, what, piece=wider, stride=stride)
        for what in whats
        for stride in _STRIDES
    ]
    return sum(shares) / len(shares)


def _latency(rows: list[dict[str, Any]], multiprocessors: int) -> float:
    """By Little's law, where requests under way are what limits the rate."""
    flights = _rows(rows, "in_flight")
    best = max(row["bytes"] / row["us"] for row in flights)
    limited = [
        row["bytes_in_flight"] * multiprocessors / (row["bytes"] / row["us"])
        for row in flights
        if row["bytes"] / row["us"] < _LIMITED * best
    ]
    # The last one is nearest to the load under which the kernels work.
    return limited[-1] if limited else flights[0]["bytes_in_flight"] * multiprocessors / best


def _bytes_in_l2(rows: list[dict[str, Any]], piece: int) -> float:
    """The most that L2 still had when it was read again.

    A part of the bytes comes at the rate of L2, which is that of the smallest array, and the rest
    at that of memory.
    """
    launch = _us(rows, "launch")
    again = _rows(rows, "again", piece=piece)
    smallest = min(again, key=lambda row: row["bytes"])
    rate_of_l2 = smallest["bytes"] / max(smallest["us"] - launch, 1e-3)
    kept = []
    for row in again:
        cold, fast = row["cold_us"] - launch, row["bytes"] / rate_of_l2
        share = (row["cold_us"] - row["us"]) / max(cold - fast, 1e-3)
        kept.append(min(max(share, 0.0), 1.0) * row["bytes"])
    return max(kept)
