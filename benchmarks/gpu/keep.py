"""Keeps what `make gpu` measured as one file of results, without logs and paths.

python -m benchmarks.gpu.keep build/gpu/results/summary.json --output benchmarks/results/NAME.json

Of several summaries, as of a run in parts, each step is taken from the last one in which it passed.
With `--markdown`, the sites are printed as docs/performance.md has them.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json
from benchmarks.common.sites import RESNET50_SITES
from benchmarks.gpu import plan, table
from benchmarks.gpu.steps import CommandRecord, StepRecord

SCHEMA: Final = 1
# The peers of the table in the documentation, with their heads.
PEERS: Final = {
    "ours": "jax_bnar",
    "ours_mask": 'with `save="mask"`',
    "flax": "Flax",
    "torch_compile": "torch.compile",
    "cudnn": "cuDNN",
    "torch": "PyTorch",
}


def keep(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The document of the results, from the documents of the runs."""
    steps: dict[str, dict[str, Any]] = {}
    for summary in summaries:
        for step in summary["steps"]:
            if step["status"] == "passed" or step["name"] not in steps:
                steps[step["name"]] = step
    kept = [
        {
            "name": name,
            "status": steps[name]["status"],
            "seconds": steps[name]["seconds"],
            "commands": [{"result": command["result"]} for command in steps[name]["commands"]],
        }
        for name in plan.NAMES
        if name in steps
    ]
    return {
        "schema": SCHEMA,
        "dry_run": any(summary["dry_run"] for summary in summaries),
        "steps": _without_paths(kept),
        "table": table.merge([_record(step) for step in kept]),
    }


def _without_paths(value: Any) -> Any:
    """Of a path, only the name of the file."""
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _record(step: dict[str, Any]) -> StepRecord:
    commands = tuple(
        CommandRecord((), {}, None, 0.0, "", "", command["result"]) for command in step["commands"]
    )
    return StepRecord(step["name"], step["status"], None, step["seconds"], 0.0, commands)


def markdown(document: dict[str, Any], batch: int, dtype: str) -> Iterator[str]:
    """A line for each site, in µs, and the sum in ms; in brackets, how many times as long as ours.

    `ours` is `jax_bnar` with its defaults.
    """
    steps = {(step["batch"], step["dtype"]): step for step in document["table"]}
    if (batch, dtype) not in steps:
        measured = "; ".join(f"{b} {d}" for b, d in steps) or "none"
        raise SystemExit(f"--markdown {batch} {dtype} was not measured; what was: {measured}.")
    rows = {
        (row["site"], row["peer"]): row
        for row in table.rows_of_results(table.results_of(document))
        if (row["batch"], row["dtype"]) == (batch, dtype)
    }
    peers = [name for name in PEERS if any(peer == name for _, peer in rows)]
    yield f"| site | n | {' | '.join(PEERS[name] for name in peers)} |"
    yield f"|{'---|' * (2 + len(peers))}"
    for site in RESNET50_SITES:
        of_site = {name: rows.get((site.label, name)) for name in peers}
        times = {
            name: None if row is None else row["median_ms"] * 1e3 for name, row in of_site.items()
        }
        yield f"| {site.label} | {site.count} | {' | '.join(_cells(times, 0))} |"
    # Of a peer that was not measured at all sites, the sum would not compare.
    sums = {
        name: total["sum_ms"] if total["sites"] == len(RESNET50_SITES) else None
        for name in peers
        for total in [steps[batch, dtype]["peers"][name]]
    }
    count = sum(site.count for site in RESNET50_SITES)
    yield f"| sum in ms | {count} | {' | '.join(_cells(sums, 2))} |"


def _cells(times: dict[str, float | None], digits: int) -> Iterator[str]:
    ours = times.get("ours")
    for name, time in times.items():
        if time is None:
            yield "-"
        elif name == "ours" or ours is None:
            yield f"**{time:.{digits}f}**" if name == "ours" else f"{time:.{digits}f}"
        else:
            yield f"{time:.{digits}f} ({time / ours:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("summaries", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, help="JSON file of results")
    parser.add_argument("--markdown", nargs=2, metavar=("BATCH", "DTYPE"))
    options = parser.parse_args(arguments)
    documents = [json.loads(path.read_text()) for path in options.summaries]
    document = keep(documents)
    if options.output is not None:
        write_json(options.output, document)
        print(f"wrote {options.output}")
    if options.markdown is not None:
        batch, dtype = options.markdown
        print(*markdown(document, int(batch), dtype), sep="\n")


if __name__ == "__main__":
    main()
