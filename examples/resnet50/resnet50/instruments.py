"""Helpers of the training loop: a stopwatch, a profiler window, and a request to stop."""

import contextlib
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class Watch:
    """Measures the loop's time since the last reading, and the part spent waiting for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._begin = time.perf_counter()
        self._waited = 0.0
        self._steps = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes evaluation and checkpoints from the speed of training."""
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin

    def read(self, batch_size: int) -> dict[str, float]:
        """The speed and the share of time spent waiting; empty before the first full step."""
        seconds = time.perf_counter() - self._begin
        if not self._steps:
            return {}
        return {
            "images_per_second": self._steps * batch_size / seconds,
            "data_wait": self._waited / seconds,
        }


class Profile:
    """Traces `steps` steps from step `at` on, or none if `at` is None."""

    def __init__(self, folder: pathlib.Path, at: int | None, steps: int) -> None:
        self._folder, self._at, self._steps = folder, at, steps
        self._end: int | None = None

    def before(self, step: int) -> None:
        """Starts the trace if it is time; `step` is the number of completed steps."""
        if step == self._at:
            jax.profiler.start_trace(str(self._folder))
            self._end = step + self._steps

    def after(self, step: int, state: Any) -> None:
        if self._end is not None and step >= self._end:
            self.stop(state)

    def stop(self, state: Any) -> None:
        if self._end is not None:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._end = None


class Stop:
    """A request to stop, made by SIGTERM (which clusters send before they reclaim a machine) or
    Ctrl-C.

    A second Ctrl-C interrupts immediately.
    """

    def __init__(self) -> None:
        self._asked = False

    def requested(self, step: int, agree_every: int) -> bool:
        """Whether to stop after `step`. Several processes agree on it every `agree_every` steps."""
        if jax.process_count() == 1:
            return self._asked
        if step % agree_every:
            return False
        return bool(multihost_utils.process_allgather(np.asarray(self._asked)).any())

    def requested_alone(self) -> bool:
        """Whether the only process stops; several would have to agree."""
        return self._asked and jax.process_count() == 1

    @classmethod
    @contextlib.contextmanager
    def on_signals(cls) -> "Iterator[Stop]":
        stop = cls()
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return

        def ask(number: int, frame: FrameType | None) -> None:
            del frame
            stop._asked = True
            signal.signal(number, previous[signal.Signals(number)])

        numbers = (signal.SIGTERM, signal.SIGINT)
        # Before any of them is replaced, because the next signal may come at once.
        previous = {number: signal.getsignal(number) for number in numbers}
        try:
            for number in numbers:
                signal.signal(number, ask)
            yield stop
        finally:
            for number in numbers:
                signal.signal(number, previous[number])
