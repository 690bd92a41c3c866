"""Prints the results as a table on the terminal."""

from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common.contention import print_warning

# Short, so that four peers with their ratios fit into the 80 columns of a log or a pipe.
_HEADS: Final[dict[str, str]] = {"ours_mask": "mask", "torch_compile": "torch c"}
_FORMS: Final[dict[str, str]] = {"bn_relu": "relu", "bn_add_relu": "add relu", "batch_norm": ""}


def print_run(run: dict[str, Any], environment: dict[str, Any], console: Console) -> None:
    """Prints the results for one dtype: each site, then the step."""
    names = list(run["step"]["peers"])
    others = [name for name in names if name != "ours"] if "ours" in names else []
    allocator = environment["allocator"]["name"]
    isas = [f"ours: {environment['jax_bnar_isa'] or 'pure JAX, no kernels'}"]
    # Results that were written before these were recorded have neither.
    if environment.get("xla_max_isa"):
        isas.append(f"XLA: at most {environment['xla_max_isa']}")
    if environment.get("torch_isa"):
        isas.append(f"PyTorch: {environment['torch_isa']}")
    table = Table(
        title=f"ResNet-50 BatchNorm sites, {run['dtype']}, batch {run['batch']},"
        " forward + backward: median ms per call\n"
        f"{environment['cpu']}, {environment['cores']} cores; {allocator} allocator;"
        f" {', '.join(isas)}",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
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
        table.add_row(site, str(row["count"]), *_cells(row, others))
    table.add_section()
    table.add_row("step", str(run["step"]["count"]), *_cells(run["step"], others), style="bold")
    console.print(table)
    _print_floors(run["step"], console)
    print_warning((row["contention"] for row in run["sites"]), console)


def _cells(row: dict[str, Any], others: list[str]) -> list[str]:
    times = {name: timing["median_ms"] for name, timing in row["peers"].items()}
    cells = [f"{time:.{3 if time < 10 else 1 if time < 1000 else 0}f}" for time in times.values()]
    cells += [f"{times[name] / times['ours']:.2f}" for name in others]
    if "ours" in times:
        cells.append(f"{row['two_read_bytes'] / times['ours'] / 1e6:.1f}")
    return [*cells, f"{row['copy_bytes_per_s'] / 1e9:.1f}"]


def _print_floors(step: dict[str, Any], console: Console) -> None:
    for name, suffix in (("y saved", ""), ("y not read back", "_without_y")):
        size = step[f"two_read_bytes{suffix}"]
        floor = step[f"two_read_floor_ms{suffix}"]
        line = f"two-read scheme, {name}: {size / 1e9:.2f} GB, {floor:.1f} ms at copy bandwidth"
        if "ours" in step["peers"]:
            line += f"; ours takes {step['peers']['ours']['median_ms'] / floor:.2f} times that"
        console.print(line)
