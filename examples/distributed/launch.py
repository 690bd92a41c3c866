"""Trains the same network in one process and in several, and compares the losses.

    python examples/distributed/launch.py [--processes 2 4]

These are real processes, which communicate through gloo over the loopback interface. On a cluster
you do not need this script: start `worker.py` once per process. With Slurm, this is
`srun python worker.py`.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Final

import tyro

WORKER: Final = pathlib.Path(__file__).with_name("worker.py")
TIMEOUT: Final = 600
BATCH: Final = 64  # the default of worker.py
# The largest difference of a loss, relative to the loss, over 20 steps. Several processes add in
# another order, and training amplifies the differences in rounding (measured: 2e-7 with two
# processes and with four).
BOUND: Final = 1e-4


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train in one process and in several, and compare the losses."""

    processes: tuple[int, ...] = (2, 4)
    """Numbers of processes to compare with a single one."""
    steps: int = 20
    """Training steps."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def ended(workers: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Kills the workers that are left at the end: if one fails, the others would wait for it."""
    try:
        yield
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


def first_to_fail(workers: list[subprocess.Popen[str]]) -> int | None:
    """Waits for all workers, or for the first that fails; its index. The others wait for it."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        statuses = [worker.poll() for worker in workers]
        for index, status in enumerate(statuses):
            if status:
                return index
        if None not in statuses:
            return None
        time.sleep(0.1)
    raise RuntimeError(f"the workers have not ended within {TIMEOUT} s")


def losses_of(processes: int, steps: int) -> list[float]:
    """The losses of a run in this many processes, each with one CPU device."""
    coordinator = f"localhost:{free_port()}"
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as files:
        folder = pathlib.Path(name)
        output = folder / "losses.json"
        # Each process has a file of its own: gloo writes lines in all of them, which would mix.
        logs = [folder / f"{index}.txt" for index in range(processes)]
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(WORKER),
                    f"--num-processes={processes}",
                    f"--process-id={index}",
                    f"--coordinator={coordinator}",
                    f"--steps={steps}",
                    f"--output={output}",
                ],
                stdout=files.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index, log in enumerate(logs)
        ]
        with ended(workers):
            failed = first_to_fail(workers)
        if failed is not None:
            raise RuntimeError(
                f"worker {failed} exited with status {workers[failed].returncode}:\n"
                f"{logs[failed].read_text()}"
            )
        print(logs[0].read_text().splitlines()[-1], flush=True)
        return json.loads(output.read_text())["losses"]


def main(arguments: Arguments) -> int:
    if arguments.steps < 1 or any(n < 1 or BATCH % n for n in arguments.processes):
        raise SystemExit(
            f"error: --steps must be at least 1, and --processes divide {BATCH}, the size of a"
            f" batch, got {arguments.steps} and {' '.join(map(str, arguments.processes))}."
        )
    print("training in 1 process", flush=True)
    alone = losses_of(1, arguments.steps)
    failed = not alone[-1] < alone[0]
    for processes in arguments.processes:
        print(f"training in {processes} processes", flush=True)
        together = losses_of(processes, arguments.steps)
        differences = [abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True)]
        # max() alone would skip a NaN that is not the first.
        worst = math.nan if any(map(math.isnan, differences)) else max(differences)
        failed = failed or not worst <= BOUND  # also if it is NaN
        print(f"{processes} processes against one: the losses differ by at most {worst:.1e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
