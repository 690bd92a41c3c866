"""When each operator of a compiled program ran, according to JAX's profiler."""

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

Times = dict[str, tuple[float, float]]


def measure(run: Callable[[], Any], names: Collection[str], steps: int) -> Times:
    """(start, end) in seconds of each operator, from the step of median kernel time.

    The result is empty if the profiler reports no operators. On a GPU, an operator of several
    kernels lasts from the start of the first kernel to the end of the last one.
    """
    jax.block_until_ready(run())
    measured = [found for _ in range(steps) if (found := _one(run, frozenset(names)))]
    if not measured:
        return {}
    measured.sort(key=lambda times: sum(end - start for start, end in times.values()))
    return measured[len(measured) // 2]


def _one(run: Callable[[], Any], names: frozenset[str]) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            return {}
        with warnings.catch_warnings():
            # The reader in jaxlib 0.12 creates its types in a way that Python 3.12 deprecates. If
            # warnings are errors, this one is raised inside C++ and terminates the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _read(jax.profiler.ProfileData.from_file(str(files[-1])), names)


def _read(data: Any, names: frozenset[str]) -> Times:
    """Reads a device's plane if there is one, because the host's then shows only the launches."""
    by_plane: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for plane in data.planes:
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        ends: dict[str, float] = {}
        for line in plane.lines:
            for event in line.events:
                start, end = event.start_ns, event.start_ns + event.duration_ns
                if event.name.startswith("end: "):
                    # XLA:CPU marks the end of an operator that other threads continued.
                    name = event.name.removeprefix("end: ")
                    ends[name] = max(ends.get(name, 0), start)
                    continue
                name = dict(event.stats).get("hlo_op")
                if name in names:
                    spans[str(name)].append((start, end))
        for name, found in spans.items():
            if name in ends:
                found.append((found[0][0], max(ends[name], found[0][0])))
        if spans:
            by_plane[plane.name] = spans
    if not by_plane:
        return {}
    device = next((n for n in sorted(by_plane) if n.startswith("/device:")), None)
    spans = by_plane[device or next(iter(by_plane))]
    origin = min(start for found in spans.values() for start, _ in found)
    return {
        name: ((min(s for s, _ in found) - origin) / 1e9, (max(e for _, e in found) - origin) / 1e9)
        for name, found in spans.items()
    }


def copy_bandwidth(size: int = 1 << 28, repetitions: int = 7) -> float:
    """The bytes per second at which XLA reads and writes an array of `size` bytes in place."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(step(jax.numpy.zeros(size // 4, jax.numpy.float32)))
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        x = jax.block_until_ready(step(x))
        best = min(best, time.perf_counter() - start)
    return 2 * size / best
