"""Runs Python in a process of its own: what may hang or crash must not take the suite with it."""

import os
import subprocess
import sys
import textwrap

_PRELUDE = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
"""

# Where JAX keeps what it has compiled, another process may just be writing the entry: it compiles.
OF_THE_CACHE = "Error reading persistent compilation cache entry"

# For programs: work(argument) in a thread for each argument, all at once.
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
    """Standard output of `code`; fails on a non-zero exit, on a crash, and after `timeout`."""
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
