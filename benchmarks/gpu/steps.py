"""Runs steps one after the other, each for at most its time, and goes on after a failure.

Whoever runs them is told what a step has so far while it runs, because everything may be killed at
any moment.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

# The exit status decides between passed and failed. A step that timed_out was killed; one that was
# skipped cannot run on this machine (`reason` says why); one that was not_run had no time left, or
# needs a step that failed; one that is running has not ended yet.
Status = Literal["passed", "failed", "timed_out", "skipped", "not_run", "running"]

# A step that has less than this left would only be started to be killed.
LEAST_SECONDS = 5.0
# How often a step that is running is reported.
REPORT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_TAIL_CHARACTERS = 6000


@dataclasses.dataclass(frozen=True)
class Command:
    """A program, and the variables that it gets in addition to this process's environment.

    Attributes:
        output: a JSON file that the program writes, and that becomes part of the record.
        deadline_option: an option that tells the program for how many seconds it may run. It then
            ends by itself, with what it has, and this is no failure.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    output: Path | None = None
    deadline_option: str | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """Commands that run at the same time and count as one.

    Attributes:
        limit_s: the seconds after which they are killed.
        needs: the names of steps without which this one makes no sense.
        skip: why it cannot run here, or None if it can.
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


@dataclasses.dataclass
class _Started:
    """A command that runs, or that ended after `seconds`."""

    command: Command
    argv: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] | None
    seconds: float | None = None

    def poll(self, begin: float) -> bool:
        """Whether it has ended."""
        if self.seconds is None and (self.process is None or self.process.poll() is not None):
            self.seconds = time.monotonic() - begin
        return self.seconds is not None

    def kill(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A process that waits in the driver does not even die.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def exit_status(self) -> int | None:
        """None for a process that was killed for its time, or that is still running."""
        if self.seconds is None:
            return None
        return 127 if self.process is None else self.process.returncode

    def record(self, begin: float) -> CommandRecord:
        seconds = time.monotonic() - begin if self.seconds is None else self.seconds
        return CommandRecord(
            argv=self.argv,
            environment=dict(self.command.environment),
            exit_status=self.exit_status(),
            seconds=round(seconds, 1),
            log=str(self.log),
            tail=self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:],
            result=_result(self.command.output),
        )


def run_steps(
    steps: Sequence[Step],
    *,
    directory: Path,
    working_directory: Path,
    budget_s: float,
    while_running: Callable[[StepRecord], None],
    after_each: Callable[[StepRecord], None],
) -> list[StepRecord]:
    """Runs all steps; logs go to `directory`.

    `while_running` gets the record of a step at its beginning and every few seconds.
    """
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
            record = _run(step, limit, directory, working_directory, while_running)
        records[step.name] = record
        after_each(record)
    return list(records.values())


def _run(
    step: Step,
    limit: float,
    directory: Path,
    working_directory: Path,
    while_running: Callable[[StepRecord], None],
) -> StepRecord:
    begin = time.monotonic()

    def record(status: Status, reason: str | None) -> StepRecord:
        records = tuple(one.record(begin) for one in started)
        seconds = round(time.monotonic() - begin, 1)
        return StepRecord(step.name, status, reason, seconds, limit, records)

    with contextlib.ExitStack() as stack:
        started = [
            _start(command, directory / f"{step.name}-{index}.log", limit, working_directory, stack)
            for index, command in enumerate(step.commands)
        ]
        # Whatever ends this process, a signal that raises included, ends the programs.
        try:
            next_report = begin
            while True:
                ended = [one.poll(begin) for one in started]
                now = time.monotonic()
                if all(ended) or now > begin + limit:
                    break
                if now >= next_report:
                    while_running(record("running", None))
                    next_report = now + REPORT_SECONDS
                time.sleep(_POLL_SECONDS)
        finally:
            for one in started:
                if one.seconds is None:
                    one.kill()
    statuses = [one.exit_status() for one in started]
    verdict: Status = "timed_out" if None in statuses else "failed" if any(statuses) else "passed"
    return record(verdict, None if verdict == "passed" else _reason(statuses, limit))


def _start(
    command: Command,
    log: Path,
    limit: float,
    working_directory: Path,
    stack: contextlib.ExitStack,
) -> _Started:
    file = stack.enter_context(log.open("wb"))
    if command.output is not None:
        command.output.unlink(missing_ok=True)  # that of an earlier run
    argv = command.argv
    if command.deadline_option is not None:
        # The program ends well before it would be killed.
        argv = (*argv, command.deadline_option, f"{0.9 * limit - 2:.1f}")
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
        file.flush()
        process = None
    return _Started(command, argv, log, process)


def _reason(statuses: Sequence[int | None], limit: float) -> str:
    return ", ".join(
        f"no end within {limit:.0f} s" if status is None else f"exit status {status}"
        for status in statuses
        if status != 0
    )


def _result(path: Path | None) -> Any:
    if path is None or not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        return {"error": f"{path.name} is no JSON: {error}"}
