"""Tests how the results of `make gpu` are summed, compared and plotted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.sites import RESNET50_SITES
from benchmarks.gpu import table
from benchmarks.gpu.steps import CommandRecord, StepRecord


def row(peer: str, site: str, count: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "peer": peer, "site": site, "count": count, "median_ms": ms, "batch": 256,
        "dtype": "bfloat16", "one_read_bytes": 100, "two_read_bytes": 200, **more,
    }  # fmt: skip


def record_of(name: str, document: dict[str, Any]) -> StepRecord:
    return StepRecord(name, "passed", None, 1, 1, (CommandRecord((), {}, 0, 1, "", "", document),))


def test_table_weights_sites_with_their_counts() -> None:
    rows = [
        row("copy", "a", 3, 2.0, bytes=4_000),
        # Hardly longer than its launch, so this is no bandwidth.
        row("copy", "b", 1, 1.0, bytes=10),
        row("ours", "a", 3, 1.0, host_share=0.9),
        row("ours", "b", 1, 5.0, host_share=0.91),
        row("flax", "a", 3, 4.0),
    ]
    record = record_of("benchmark_jax", {"family": "jax", "rows": rows})
    (group,) = table.merge([record])
    assert group["peers"] == {
        "ours": {"sites": 2, "sum_ms": 8.0, "host_bound": 0.62},
        "flax": {"sites": 1, "sum_ms": 12.0, "host_bound": 0.0},
    }
    assert group["copy_bytes_per_s"] == 2e6
    assert group["one_read_floor_ms"] == pytest.approx(400 / 2e6 * 1e3)
    assert group["slower_than"] == {"flax": {"ours": [], "ours_mask": []}}
    text = "\n".join(table.render([record]))
    assert "12.000  flax  (1 sites only)" in text
    assert "8.000  ours  (62% of it may be the host's time)" in text
    assert "slower than" not in text


def test_table_names_the_sites_where_a_peer_is_faster() -> None:
    jax_rows = [
        row("ours", "a", 3, 1.0),
        row("ours", "b", 1, 5.0),
        row("ours_mask", "a", 3, 7.5),
        row("ours_mask", "b", 1, 3.0),
        row("ours_cluster", "b", 1, 4.0),
    ]
    torch_rows = [
        row("copy", "b", 1, 0.1, bytes=1),
        row("torch", "a", 3, 6.0),
        row("torch", "b", 1, 4.9),
    ]
    records = [
        record_of("benchmark_jax", {"family": "jax", "rows": jax_rows}),
        record_of("benchmark_torch", {"family": "torch", "rows": torch_rows}),
    ]
    assert table.merge(records)[0]["slower_than"] == {"torch": {"ours": ["b"], "ours_mask": ["a"]}}
    lines = list(table.render(records))
    assert "  ours is slower than torch at b" in lines
    assert "  ours_mask is slower than torch at a" in lines


def test_table_has_the_programs_own_lines() -> None:
    record = record_of("joins", {"family": "inference_joins", "summary": ["so much", "and more"]})
    assert list(table.render([record])) == ["so much", "and more"]


def test_sites_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tyro")
    from benchmarks.gpu import plot

    sites = [site.label for site in RESNET50_SITES]
    rows = [row("copy", sites[0], 1, 0.1, bytes=430_000)]
    rows += [row("ours", site, 2, 1.0 + i) for i, site in enumerate(sites)]
    rows += [row("cudnn", sites[3], 2, 7.0)]
    records = [record_of("benchmark_jax", {"family": "jax", "rows": rows, "device": {"kind": "G"}})]
    summary = {
        "dry_run": True,
        "steps": [dataclasses.asdict(record) for record in records],
        "table": table.merge(records),
    }
    (run,) = plot.runs_of(summary)
    assert [site["peers"]["ours"]["median_ms"] for site in run["sites"]] == [
        1.0 + i for i in range(len(sites))
    ]
    assert run["step"]["peers"]["cudnn"] == {"median_ms": 14.0}
    assert plot.machine_of(summary) == "G, DRY RUN"
    picture = tmp_path / "sites.png"
    results = tmp_path / "summary.json"
    results.write_text(json.dumps(summary))
    plot.main([str(results), str(picture)])
    assert picture.stat().st_size > 0
    results.write_text('{"steps": [], "table": [], "dry_run": true}')
    with pytest.raises(SystemExit, match="has no times"):
        plot.main([str(results), str(picture)])
