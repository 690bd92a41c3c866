"""Tables of the benchmarks are whole in a terminal of 80 columns."""

import io
import json
from collections.abc import Callable
from typing import Any

import jax
import pytest

for _package in ("flax", "matplotlib", "rich", "tyro"):
    pytest.importorskip(_package)

from rich.console import Console  # noqa: E402

from benchmarks.network import resnet50_step  # noqa: E402
from benchmarks.sharding import collective_bytes  # noqa: E402
from benchmarks.sites import report  # noqa: E402

pytestmark = pytest.mark.one_python


def a_run(peers: tuple[str, ...]) -> dict[str, Any]:
    """The results of a run with large numbers, which need the widest columns."""
    times = {name: {"median_ms": 1234.5} for name in peers}
    row = {
        "height": 14,
        "width": 14,
        "channels": 1024,
        "form": "bn_add_relu",
        "count": 16,
        "peers": times,
        "two_read_bytes": 10**12,
        "copy_bytes_per_s": 44.4e9,
        "contention": 0.5,
    }
    floors = {f"two_read_{kind}{s}": 10**9 for kind in ("bytes", "floor_ms") for s in WITHOUT}
    return {"dtype": "bfloat16", "batch": 256, "sites": [row], "step": {**row, **floors}}


def assert_whole(printed: str) -> None:
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80


def lines_of(write: Callable[[Console], object]) -> list[str]:
    """What is written to a console of 80 columns, which is whole."""
    file = io.StringIO()
    write(Console(file=file, width=80))
    assert_whole(file.getvalue())
    return file.getvalue().splitlines()


WITHOUT = ("", "_without_y")
PEERS = ("ours", "ours_mask", "flax", "torch")


def test_the_table_of_sites_is_whole_at_80_columns() -> None:
    machine = {
        "allocator": {"name": "jemalloc"},
        "jax_bnar_isa": "avx512bf16",
        "xla_max_isa": "AVX512_BF16",
        "torch_isa": "AVX512",
        "cpu": "AMD EPYC, cpu family 25, model 17",
        "cores": 2,
    }
    lines = lines_of(lambda console: report.print_run(a_run(PEERS), machine, console))
    (line,) = (line for line in lines if "14x14x1024" in line)
    assert line.split() == (
        ["14x14x1024", "add", "relu", "16"] + ["1234"] * 4 + ["1.00"] * 3 + ["810.0", "44.4"]
    )


def test_many_peers_are_several_tables_of_80_columns() -> None:
    machine = {"allocator": {"name": "jemalloc"}, "jax_bnar_isa": "avx2", "cpu": "a", "cores": 2}
    run = a_run((*PEERS, "torch_compile", "onednn", "onednn_blocked", "paddle", "tensorflow"))
    run["step"]["unavailable"] = {"another": "it is not installed; " + "pip install it " * 8}
    lines = lines_of(lambda console: report.print_run(run, machine, console))
    assert len([line for line in lines if "14x14x1024" in line]) == 3
    rows = [line.split()[:5] for line in lines]
    assert ["ours", "1234", "1.00"] in rows
    assert ["torch_compile", "1234", "1.00"] in rows
    assert ["another", "-", "-", "not", "measured:"] in rows


def test_other_tables_are_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("median_ms", "peak_bytes", "temporary_bytes", "saved_residual_bytes")
    network = dict.fromkeys(kinds, 10_000.0 * 2**20)
    names = ("fused", "fused, save=mask", "flax, fuse", "flax")
    run = {"batch": 256, "size": 224, "dtype": "bfloat16", "contention": 0.5}
    run |= {"networks": dict.fromkeys(names, network)}
    lines = lines_of(lambda console: console.print(resnet50_step.table(run)))
    assert any("fused, save=mask" in line for line in lines)

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(collective_bytes, "of_step", lambda _: (212, 637_440))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    collective_bytes.main()
    out, err = capsys.readouterr()
    assert_whole(out)
    assert "compiling Flax" in err
    collective_bytes.main(json_wanted=True)
    values = json.loads(capsys.readouterr().out)
    assert values["jax_bnar"] == {"all_reduces": 212, "bytes": 637_440}
