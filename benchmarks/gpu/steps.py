"""Runs commands one after the other, each for at most its time, and goes on after a failure."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

# passed, failed: the exit status. timed_out: killed. skipped: the machine lacks the tool, see
# `reason`. not_run: no time was left, or a step that it needs failed.
Status = Literal["passed", "failed", "timed_out", "skipped", "not_run"]

# With less than this left, a step would only be started to be killed.
LEAST_SECONDS = 5.0
_TAIL_CHARACTERS = 6000


@dataclasses.dataclass(frozen=True)
class Command:
    """A program and what it gets beside this process's environment.

    Attributes:
        output: a JSON file that the program writes, and that becomes part of the record.
        deadline_option: an option that tells the program for how many seconds it may run; it ends
            by itself, with what it has, so that this is no failure.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    output: Path | None = None
    deadline_option: str | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """Commands that run at the same time, and count as one.

    Attributes:
        limit_s: seconds after which they are killed.
        needs: names of steps without which this one makes no sense.
        skip: why it cannot run here, None if it can.
    """

    name: str
    commands: tuple[Command, ...]
    limit_s: float
    needs: tuple[str, ...] = ()
    skip: str | None = None


@dataclasses.dataclass(frozen=True)
class CommandRecord:
    argv: tuple[str, ...]
    environment: dict[str, str]
    exit_status: int | None
    seconds: float
    log: str
    tail: str
    result: Any = None


@dataclasses.dataclass(frozen=True)
class StepRecord:
    name: str
    status: Status
    reason: str | None
    seconds: float
    limit_s: float
    commands: tuple[CommandRecord, ...] = ()


def run_steps(
    steps: Sequence[Step],
    *,
    directory: Path,
    working_directory: Path,
    budget_s: float,
    load: Callable[[Path], Any],
    after_each: Callable[[StepRecord], None],
) -> list[StepRecord]:
    """Runs all steps; logs go to `directory`. `load` reads a command's output file."""
    end = time.monotonic() + budget_s
    records: dict[str, StepRecord] = {}
    for step in steps:
        left = end - time.monotonic()
        limit = min(step.limit_s, left)
        broken = [
            name for name in step.needs if name in records and records[name].status != "passed"
        ]
        if step.skip is not None:
            record = StepRecord(step.name, "skipped", step.skip, 0.0, step.limit_s)
        elif broken:
            reason = f"without {', '.join(broken)} there is nothing to run"
            record = StepRecord(step.name, "not_run", reason, 0.0, step.limit_s)
        elif limit < LEAST_SECONDS:
            reason = f"{max(left, 0):.0f} s of {budget_s:g} s were left"
            record = StepRecord(step.name, "not_run", reason, 0.0, step.limit_s)
        else:
            record = _run(step, limit, directory, working_directory, load)
        records[step.name] = record
        after_each(record)
    return list(records.values())


def _run(
    step: Step, limit: float, directory: Path, working_directory: Path, load: Callable[[Path], Any]
) -> StepRecord:
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        started = []
        for index, command in enumerate(step.commands):
            log = directory / f"{step.name}-{index}.log"
            file = stack.enter_context(log.open("wb"))
            if command.output is not None:
                command.output.unlink(missing_ok=True)  # that of an earlier run
            argv = command.argv
            if command.deadline_option is not None:
                # Ends well before it would be killed.
                argv = (*argv, command.deadline_option, f"{0.9 * limit - 2:.1f}")
            process: subprocess.Popen[bytes] | OSError
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=working_directory,
                    env=dict(os.environ) | dict(command.environment),
                    start_new_session=True,
                )
            except OSError as error:
                file.write(f"{error}\n".encode())
                process = error
            started.append((command, argv, process, log))
        finished = [
            (command, argv, log, *_wait(process, begin, limit))
            for command, argv, process, log in started
        ]
    records = tuple(
        CommandRecord(
            argv=argv,
            environment=dict(command.environment),
            exit_status=status,
            seconds=round(seconds, 1),
            log=str(log),
            tail=log.read_text(errors="replace")[-_TAIL_CHARACTERS:],
            result=_result(command.output, load),
        )
        for command, argv, log, status, seconds in finished
    )
    statuses = [record.exit_status for record in records]
    verdict: Status = "timed_out" if None in statuses else "failed" if any(statuses) else "passed"
    reason = None if verdict == "passed" else _reason(statuses, limit)
    return StepRecord(
        step.name, verdict, reason, round(time.monotonic() - begin, 1), limit, records
    )


def _wait(
    process: "subprocess.Popen[bytes] | OSError", begin: float, limit: float
) -> tuple[int | None, float]:
    """The exit status, None for a process that was killed for its time, and its seconds."""
    if isinstance(process, OSError):
        return 127, 0.0
    status: int | None
    try:
        status = process.wait(max(0.0, begin + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that waits in the driver does not even die.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    return status, time.monotonic() - begin


def _reason(statuses: Sequence[int | None], limit: float) -> str:
    return ", ".join(
        f"no end within {limit:.0f} s" if status is None else f"exit status {status}"
        for status in statuses
        if status != 0
    )


def _result(path: Path | None, load: Callable[[Path], Any]) -> Any:
    if path is None or not path.exists():
        return None
    try:
        return load(path)
    except ValueError as error:
        return {"error": f"{path.name} is no JSON: {error}"}
