"""The upper bound on bandwidth: bytes per second of a plain copy by all cores.

Every core copies its own buffer with NumPy, which calls the C library's memcpy. The buffers are so
large that memcpy bypasses the cache when it stores, as the best kernels do. (glibc does so from 3/4
of the shared cache on; below that, each store first reads its cache line, which costs a third of
the bandwidth.) They are page-aligned, use huge pages where the system has them, and are touched
before the first copy and then reused. A copied byte counts twice, as read and as written.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np


class CopyRoof:
    """A context manager that copies `bytes_per_core` on each of `cores` threads at once."""

    def __init__(self, cores: int, bytes_per_core: int):
        self.bytes_moved = 2 * cores * bytes_per_core
        self._sources = [_buffer(bytes_per_core) for _ in range(cores)]
        self._targets = [_buffer(bytes_per_core) for _ in range(cores)]
        self._threads = ThreadPoolExecutor(cores)

    def __enter__(self) -> "CopyRoof":
        self._copy()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def measure(self) -> float:
        """Times one copy and returns bytes per second."""
        start = perf_counter()
        self._copy()
        return self.bytes_moved / (perf_counter() - start)

    def _copy(self) -> None:
        list(self._threads.map(np.copyto, self._targets, self._sources))


def _buffer(size: int) -> np.ndarray:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    array.fill(1)
    return array
