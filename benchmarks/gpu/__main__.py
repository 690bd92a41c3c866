"""The command: `python -m benchmarks.gpu`."""

import argparse
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json
from benchmarks.gpu import plan, table
from benchmarks.gpu.steps import StepRecord, run_steps

SCHEMA: Final = 2
# The log.txt of a run has this many characters from the end of each program's log.
_LOG_CHARACTERS: Final = 200_000


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Builds the CUDA kernels for the GPU found, runs its tests, compute-sanitizer"
        " and the benchmark, each step for at most its time, and goes on after a failure. Exit"
        " code 0 only if every step passed or was skipped for want of a tool.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/gpu/results"), metavar="DIR",
        help="folder for summary.json and log.txt, written every few seconds"
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
        help="time for all steps together; steps for which none is left are not run, and the last"
        " lines say how to run them (default: unlimited)",
    )  # fmt: skip
    parser.add_argument(
        "--wheel", type=Path, nargs="+", default=(), metavar="FILE",
        help="wheels to install instead of building: jax_bnar-*.whl and jax_bnar_cuda13-*.whl",
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
    names = tuple(name for name in plan.NAMES if name in options.only and name not in options.skip)
    steps = plan.Plan(
        options.platform,
        work,
        options.workers,
        tuple(options.benchmark),
        tuple(path.resolve() for path in options.wheel),
    ).steps(names)
    report = Report(output, work, options.platform, names)

    def after_each(record: StepRecord) -> None:
        report.finish(record)
        if record.name == "smoke" and (strategy := strategy_of_the_rest(record)):
            os.environ["JAX_BNAR_CUDA_STRATEGY"] = strategy
            print(f"another strategy does not work, so later steps use {strategy}", flush=True)

    # Whoever ends a machine sends this signal first. As an exception it also ends the step's
    # programs, and the summary has what they had written.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        run_steps(
            steps,
            directory=work,
            working_directory=plan.ROOT,
            budget_s=options.budget,
            while_running=report.update,
            after_each=after_each,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    return report.print_end()


class Report:
    """The files of a run: complete after each step, and as far as it came while a step runs."""

    def __init__(self, output: Path, work: Path, platform: str, names: Sequence[str]) -> None:
        self.summary = output / "summary.json"
        self._log = output / "log.txt"
        self._work = work
        self._platform = platform
        self._names = names
        self._begin = time.monotonic()
        self._records: list[StepRecord] = []
        self._logged = ""

    def update(self, record: StepRecord) -> None:
        """Writes what there is, with a step that is not over."""
        self._write([*self._records, record], self._logged + _logged(record))

    def finish(self, record: StepRecord) -> None:
        self._records.append(record)
        print(_line(record), flush=True)
        write_json(self._work / f"{record.name}.record.json", dataclasses.asdict(record))
        self._logged += _logged(record)
        self._write(self._records, self._logged)

    def _write(self, records: Sequence[StepRecord], log: str) -> None:
        self._log.write_text(log)
        seconds = time.monotonic() - self._begin
        write_json(self.summary, summarise(records, self._platform, self._names, seconds))

    def print_end(self) -> int:
        """Prints the tables, and returns the exit status."""
        if self._platform == "cpu":
            print("DRY RUN on the CPU: the times below say nothing of a GPU")
        for line in table.render(self._records):
            print(line)
        if any(row["peer"] in table.OURS for row in table.rows_of(self._records)):
            print(f"next to the model: python -m benchmarks.gpu.model --measured {self.summary}")
        left = [record.name for record in self._records if record.status == "not_run"]
        if left:
            print(f"run what was not run with --only {' '.join(left)}, and another --output")
        good = all(record.status in ("passed", "skipped") for record in self._records)
        print(f"wrote {self.summary}; {'all passed' if good else 'NOT all passed'}")
        return 0 if good else 1


def strategy_of_the_rest(smoke: StepRecord) -> str | None:
    """The strategy that later steps must use, or None if all of them work.

    The kernels of `two_kernels` wait for no other block. With another strategy that hangs, no later
    step would have a result.
    """
    result = (smoke.commands[0].result if smoke.commands else None) or {}
    strategies, running = result.get("strategies", {}), str(result.get("running"))
    work = {
        name
        for name, entry in strategies.items()
        if "error" not in entry and not running.startswith(f"{name},")
    }
    all_work = result.get("complete") and work == set(strategies)
    return "two_kernels" if "two_kernels" in work and not all_work else None


def _exit_on_signal(number: int, frame: Any) -> None:
    del frame
    raise SystemExit(128 + number)


def _logged(record: StepRecord) -> str:
    parts = [f"=== {_line(record)}\n"]
    for command in record.commands:
        parts.append(f"$ {' '.join(command.argv)}\n")
        parts.append(Path(command.log).read_text(errors="replace")[-_LOG_CHARACTERS:])
    return "".join(parts)


def summarise(
    records: Sequence[StepRecord], platform: str, names: Sequence[str], seconds: float
) -> dict[str, Any]:
    complete = [record.name for record in records if record.status != "running"] == list(names)
    return {
        "schema": SCHEMA,
        "platform": platform,
        "dry_run": platform == "cpu",
        "steps_asked": list(names),
        "seconds": round(seconds, 1),
        "complete": complete,
        "passed": complete and all(record.status in ("passed", "skipped") for record in records),
        "steps": [dataclasses.asdict(record) for record in records],
        "table": table.merge(records),
    }


def _line(record: StepRecord) -> str:
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.seconds:6.1f} s  {record.name}  {record.status}{reason}"


if __name__ == "__main__":
    sys.exit(main())
