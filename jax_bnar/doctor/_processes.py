"""Runs other programs with a timeout, because a broken driver can hang any program that uses it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_bnar._base.startup import signal_name

# A process that is blocked in the kernel (by a driver) survives even SIGKILL, and is left behind.
_SECONDS_TO_DIE = 5


class Finished(NamedTuple):
    """The outcome of a program; `problem` describes a failure, and is None for exit status 0."""

    problem: str | None
    stdout: str
    stderr: str


def run(
    command: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
) -> Finished:
    """Runs a program for at most `timeout` seconds; raises nothing."""
    with tempfile.TemporaryDirectory(prefix="jax_bnar_doctor_") as directory:
        # Files rather than pipes: reading a pipe would block until every grandchild has closed it.
        out, err = (pathlib.Path(directory) / name for name in ("stdout", "stderr"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                return Finished(str(error), "", "")
            problem = _wait(process, timeout)
        return Finished(problem, _text(out), _text(err))


def _wait(process: subprocess.Popen[bytes], timeout: float) -> str | None:
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        # Kills the whole session, because a grandchild such as nvidia-smi may be what hangs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_DIE)
        return f"timed out after {timeout:g} s"
    if status < 0:
        return f"killed by {signal_name(-status)}"
    return f"exit status {status}" if status else None


def _text(path: pathlib.Path) -> str:
    return path.read_bytes().decode(errors="replace")
