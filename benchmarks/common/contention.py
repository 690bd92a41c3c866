"""How much of the machine other processes used during a measurement (Linux; None elsewhere)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from rich.console import Console

_STAT = Path("/proc/stat")
# Above this share of the machine, tables warn that the times may mean nothing.
TOLERATED = 0.05


@dataclass(frozen=True)
class Contention:
    """Measures from its construction on; `share` returns what other processes have used since."""

    _busy: float | None = field(default_factory=lambda: _busy_seconds())
    _own: float = field(default_factory=lambda: _own_seconds())
    _start: float = field(default_factory=perf_counter)

    def share(self) -> float | None:
        """CPU time used by others or stolen by the hypervisor, over wall time times all cores."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        capacity = (perf_counter() - self._start) * (os.cpu_count() or 1)
        return max(0.0, others / capacity)


def print_warning(shares: Iterable[float | None], console: Console) -> None:
    """Prints the warning, if there is one, so that it catches the eye."""
    sentence = warning(shares)
    if sentence is not None:
        console.print(f"[bold red]{sentence}")


def warning(shares: Iterable[float | None]) -> str | None:
    """A warning if others used too much of the machine during a measurement, otherwise None."""
    most = max((share for share in shares if share is not None), default=0.0)
    if most <= TOLERATED:
        return None
    return f"other processes used up to {most:.0%} of the machine: measure again when it is quiet"


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float | None:
    """User, nice, system, interrupts and stolen time of all cores since boot."""
    try:
        fields = _STAT.read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
