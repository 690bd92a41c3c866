"""Runs Python in a separate process, so that a hang or a crash does not end the test run."""

import os
import pathlib
import subprocess
import sys
import textwrap

_PRELUDE = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
"""

# JAX warns with this text if another process is writing the cache entry, and compiles the program.
OF_THE_CACHE = "Error reading persistent compilation cache entry"

# Code for programs: runs work(argument) for all arguments at once, each in a thread.
IN_THREADS = """
import threading

def in_threads(work, arguments):
    failures = []

    def guarded(argument):
        try:
            work(argument)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(argument,)) for argument in arguments]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failures, failures
"""


def run_python(code: str, *, timeout: float, prelude: str = _PRELUDE) -> str:
    """Runs `code` and returns its output; fails on non-zero exit status, crash or timeout."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_BNAR_IMPLEMENTATION"}
    finished = subprocess.run(
        [
            sys.executable, "-W", "error", "-W", f"ignore:{OF_THE_CACHE}:UserWarning",
            "-c", prelude + textwrap.dedent(code),
        ],
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert finished.returncode == 0, (
        f"exit status {finished.returncode}\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
    )
    return finished.stdout


def python_path(*folders: pathlib.Path) -> str:
    """The PYTHONPATH with which these folders are searched before those of the caller's."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
