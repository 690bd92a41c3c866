"""The roof: bytes per second of a plain copy by all cores.

Every core copies a buffer of its own with NumPy, that is with the C library's memcpy. Buffers are
large, so that memcpy stores past the cache as the best kernels do (glibc does from 3/4 of the
shared cache on; below that each store first reads its line, which costs a third), page-aligned, on
huge pages where the system has them, touched before, and reused. A copied byte counts twice: read
and written.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np


class CopyRoof:
    """Copies `bytes_per_core` on each of `cores` threads at once; a context manager."""

    def __init__(self, cores: int, bytes_per_core: int):
        self.bytes_moved = 2 * cores * bytes_per_core
        self._sources = [_buffer(bytes_per_core) for _ in range(cores)]
        self._targets = [_buffer(bytes_per_core) for _ in range(cores)]
        self._threads = ThreadPoolExecutor(cores)

    def __enter__(self) -> "CopyRoof":
        self._copy()
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()

    def measure(self) -> float:
        """Bytes per second of one copy."""
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
