"""Prints the results as a table on the terminal."""

from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import print_warning

# Short, so that four peers with their ratios fit into the 80 columns of a log or a pipe.
_HEADS: Final[dict[str, str]] = {
    "ours_mask": "mask",
    "torch_compile": "torch\ncomp",
    "onednn": "dnnl",
    "onednn_blocked": "dnnl\nblk",
    "tensorflow": "tf",
}
_FORMS: Final[dict[str, str]] = {"bn_relu": "relu", "bn_add_relu": "add relu", "batch_norm": ""}


# The peers beside ours that fit into a table of 80 columns.
_PER_TABLE: Final = 3


def print_run(run: dict[str, Any], environment: dict[str, Any], console: Console) -> None:
    """Prints the results for one dtype: each site, then the step, then what is not in them."""
    measured = list(dict.fromkeys(name for row in run["sites"] for name in row["peers"]))
    ours = [name for name in measured if name == "ours"]
    others = [name for name in measured if name != "ours"]
    groups = [others[at : at + _PER_TABLE] for at in range(0, len(others), _PER_TABLE)] or [[]]
    title: str | None = _title(run, environment)
    for group in groups:
        console.print(_table(run, [name for name in measured if name in (*ours, *group)], title))
        title = None
    unavailable = run["step"].get("unavailable", {})
    if unavailable or len(groups) > 1:
        console.print(_step_table(run["step"], unavailable))
    _print_floors(run["step"], console)
    print_warning((row["contention"] for row in run["sites"]), console)


def _title(run: dict[str, Any], environment: dict[str, Any]) -> str:
    layout = run.get("layout", "NHWC")  # older results do not name it
    allocator = environment["allocator"]["name"]
    isas = [f"ours: {environment['jax_bnar_isa'] or 'pure JAX, no kernels'}"]
    # Results that were written before these were recorded have none of them.
    if environment.get("xla_max_isa"):
        isas.append(f"XLA: at most {environment['xla_max_isa']}")
    if environment.get("torch_isa"):
        isas.append(f"PyTorch: {environment['torch_isa']}")
    if environment.get("onednn"):
        isas.append("oneDNN {version}: {isa}".format(**environment["onednn"]))
    return (
        f"ResNet-50 BatchNorm sites, {layout}, {run['dtype']}, batch {run['batch']},"
        " forward + backward: median ms per call\n"
        f"{environment['cpu']}, {environment['cores']} cores; {allocator} allocator;"
        f" {', '.join(isas)}"
    )


def _plain_table(title: str | None) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)


def _table(run: dict[str, Any], names: list[str], title: str | None) -> Table:
    """Each site, then the step, for a few peers."""
    others = [name for name in names if name != "ours"] if "ours" in names else []
    table = _plain_table(title)
    table.add_column("site", no_wrap=True)

    def add_numbers(head: str) -> None:
        table.add_column(head, justify="right", no_wrap=True)

    add_numbers("n")
    for name in names:
        add_numbers(_HEADS.get(name) or name)
    for name in others:
        add_numbers(f"{_HEADS.get(name, name)}\n/ours")
    if "ours" in names:
        add_numbers("ours\nGB/s")
    add_numbers("copy\nGB/s")

    for row in run["sites"]:
        site = f"{row['height']}x{row['width']}x{row['channels']} {_FORMS[row['form']]}"
        table.add_row(site, str(row["count"]), *_cells(row, names, others))
    table.add_section()
    step = run["step"]
    table.add_row("step", str(step["count"]), *_cells(step, names, others), style="bold")
    return table


def _cells(row: dict[str, Any], names: list[str], others: list[str]) -> list[str]:
    times = {name: timing["median_ms"] for name, timing in row["peers"].items()}
    cells = [_milliseconds(times.get(name)) for name in names]
    cells += [_ratio(times.get(name), times.get("ours")) for name in others]
    if "ours" in names:
        rate = f"{row['two_read_bytes'] / times['ours'] / 1e6:.1f}" if "ours" in times else "-"
        cells.append(rate)
    return [*cells, f"{row['copy_bytes_per_s'] / 1e9:.1f}"]


def _milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.{3 if time < 10 else 1 if time < 1000 else 0}f}"


def _ratio(time: float | None, ours: float | None) -> str:
    return "-" if time is None or ours is None else f"{time / ours:.2f}"


def _step_table(step: dict[str, Any], unavailable: dict[str, str]) -> Table:
    """A row for each peer, those that could not be measured with the reason."""
    table = _plain_table("the sum of all sites")
    table.add_column("peer", no_wrap=True)
    for head in ("ms", "/ours"):
        table.add_column(f"  {head}", justify="right", no_wrap=True)
    table.add_column("  ")
    times = {name: timing["median_ms"] for name, timing in step["peers"].items()}
    for name, time in times.items():
        table.add_row(name, _milliseconds(time), _ratio(time, times.get("ours")), "")
    for name, why in unavailable.items():
        table.add_row(name, "-", "-", f"  not measured: {why}")
    return table


def _print_floors(step: dict[str, Any], console: Console) -> None:
    for name, suffix in (("y saved", ""), ("y not read back", "_without_y")):
        size = step[f"two_read_bytes{suffix}"]
        floor = step[f"two_read_floor_ms{suffix}"]
        line = f"two-read scheme, {name}: {size / 1e9:.2f} GB, {floor:.1f} ms at copy bandwidth"
        if "ours" in step["peers"]:
            line += f"; ours takes {step['peers']['ours']['median_ms'] / floor:.2f} times that"
        console.print(line)
