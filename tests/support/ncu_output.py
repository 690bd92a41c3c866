"""What Nsight Compute prints for the kernels of the benchmark, made up."""

from typing import Any

from benchmarks.gpu import ncu

FORWARD = {
    "gpu__time_duration.sum": "200,000",
    "dram__bytes_read.sum": "600000000",
    "dram__bytes_write.sum": "400000000",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "1.50",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "12.25",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "3.10",
}


def launched(function: str, **values: str) -> tuple[str, dict[str, str]]:
    """One of our kernels as ncu names it, with values for some of the metrics."""
    return f"void jax_bnar::cuda::{function}<__nv_bfloat16, (int)8>(...)", values


def table(*kernels: tuple[str, dict[str, str]], metrics: tuple[str, ...] = ncu.METRICS) -> str:
    names = [
        "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
        "Block Size", "Grid Size", "Device", "CC", *sorted(metrics),
    ]  # fmt: skip
    units = {"gpu__time_duration.sum": "ns"}
    rows = [names, [units.get(name, "") for name in names]]
    for index, (signature, values) in enumerate(kernels):
        identity = {
            "ID": str(index), "Kernel Name": signature, "Block Size": "(256, 1, 1)",
            "Grid Size": "(264, 1, 1)",
        }  # fmt: skip
        rows.append([(identity | values).get(name, "7") for name in names])
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def site(label: str, **launches: int) -> dict[str, Any]:
    return {
        "site": label, "count": 3, "batch": 256, "dtype": "bfloat16",
        "minimum_bytes": {"forward": 500_000_000, "backward": 800_000_000},
        "planned": {
            "forward": {"bytes": 800_000_000, "bytes_again": 100_000_000},
            "backward": {"bytes": 900_000_000, "bytes_again": 0},
        },
        "launches": {name.replace("__", " "): count for name, count in launches.items()},
    }  # fmt: skip
