"""Interleaved timing of several steps in one process."""

import gc
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

Run = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Samples of one step, each the mean over `repetitions` calls in milliseconds per call."""

    repetitions: int
    samples_ms: list[float]

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)

    @property
    def min_ms(self) -> float:
        return min(self.samples_ms)

    def as_dict(self) -> dict[str, Any]:
        """Everything that a result file holds of a timing."""
        return {
            "median_ms": self.median_ms,
            "min_ms": self.min_ms,
            "repetitions": self.repetitions,
            "samples_ms": self.samples_ms,
        }


def interleave(
    runs: Mapping[str, Run], *, rounds: int, min_sample_ms: float, each_round: Run | None = None
) -> dict[str, Timing]:
    """Times every step once per round, in an order that rotates from round to round.

    The results of a call are freed before the next call begins, so that it can reuse their memory.
    Each sample is preceded by untimed calls, which bring threads, caches and the allocator into the
    state that a loop of this step leaves them in.
    """
    names = list(runs)
    repetitions = {name: _repetitions(runs[name], min_sample_ms) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        for index in range(rounds):
            if each_round is not None:
                each_round()
            first = index % len(names) if names else 0
            for name in names[first:] + names[:first]:
                samples[name].append(_sample_ms(runs[name], repetitions[name]))
    return {name: Timing(repetitions[name], samples[name]) for name in names}


# PyTorch's idle threads (libgomp) spin for about 6 ms before they sleep, on cores that the next
# peer needs. A pause would also put that peer's own threads to sleep. In a virtual machine Linux
# then often wakes two of them on the same core and leaves them there for the whole sample: a step
# of 0.28 ms took 0.46 in a third of the samples after a pause, but in hardly any after calls.
_SETTLE_SECONDS = 0.03


def _sample_ms(run: Run, repetitions: int) -> float:
    settled = perf_counter() + _SETTLE_SECONDS
    run()
    while perf_counter() < settled:
        run()
    start = perf_counter()
    for _ in range(repetitions):
        run()  # the result is not bound to a name, so it is freed immediately
    return (perf_counter() - start) * 1e3 / repetitions


def _repetitions(run: Run, min_sample_ms: float) -> int:
    run()
    once = min(_sample_ms(run, 1) for _ in range(2))
    return max(1, math.ceil(min_sample_ms / once))


@contextmanager
def _no_garbage_collection():
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
