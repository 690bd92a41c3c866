"""The command: `python -m benchmarks.gpu`."""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json
from benchmarks.gpu import plan, table
from benchmarks.gpu.steps import StepRecord, run_steps

SCHEMA: Final = 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Builds the CUDA kernels for the GPU found, runs its tests, compute-sanitizer"
        " and the benchmark, each step for at most its time, and goes on after a failure. Exit"
        " code 0 only if every step passed or was skipped for want of a tool.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/gpu/results"), metavar="DIR",
        help="folder for summary.json and log.txt, written again after each step"
        " (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=Path("build/gpu"), metavar="DIR",
        help="folder for the built package and each step's record and log (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=plan.NAMES, default=plan.DEFAULT)
    parser.add_argument("--skip", nargs="+", choices=plan.NAMES, default=())
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS",
        help="for everything; steps for which none is left are not run (default: no end)",
    )  # fmt: skip
    parser.add_argument(
        "--platform", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a dry run of the same steps with tiny shapes, which says nothing of a GPU",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument(
        "benchmark", nargs="*",
        help="options of benchmarks.gpu.jax_benchmark and torch_benchmark, after --",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    work, output = options.work.resolve(), options.output.resolve()
    for folder in (work, output):
        folder.mkdir(parents=True, exist_ok=True)
    names = tuple(name for name in options.only if name not in options.skip)
    steps = plan.Plan(options.platform, work, options.workers, tuple(options.benchmark)).steps(
        names
    )
    begin = time.monotonic()
    records: list[StepRecord] = []
    log = output / "log.txt"
    log.write_text("")

    def after_each(record: StepRecord) -> None:
        records.append(record)
        print(_line(record), flush=True)
        write_json(work / f"{record.name}.record.json", dataclasses.asdict(record))
        with log.open("a") as file:
            file.write(f"=== {_line(record)}\n")
            for command in record.commands:
                file.write(f"$ {' '.join(command.argv)}\n")
                file.write(Path(command.log).read_text(errors="replace")[-200_000:])
        document = summarise(records, options.platform, names, time.monotonic() - begin)
        write_json(output / "summary.json", document)

    run_steps(
        steps,
        directory=work,
        working_directory=plan.ROOT,
        budget_s=options.budget,
        load=lambda path: json.loads(path.read_text()),
        after_each=after_each,
    )
    if options.platform == "cpu":
        print("DRY RUN on the CPU: the times below say nothing of a GPU")
    for line in table.render(records):
        print(line)
    good = all(record.status in ("passed", "skipped") for record in records)
    print(f"wrote {output / 'summary.json'}; {'all passed' if good else 'NOT all passed'}")
    return 0 if good else 1


def summarise(
    records: Sequence[StepRecord], platform: str, names: Sequence[str], seconds: float
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "platform": platform,
        "dry_run": platform == "cpu",
        "steps_asked": list(names),
        "seconds": round(seconds, 1),
        "complete": len(records) == len(names),
        "passed": len(records) == len(names)
        and all(record.status in ("passed", "skipped") for record in records),
        "steps": [dataclasses.asdict(record) for record in records],
        "table": table.merge(records),
    }


def _line(record: StepRecord) -> str:
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.seconds:6.1f} s  {record.name}  {record.status}{reason}"


if __name__ == "__main__":
    sys.exit(main())
