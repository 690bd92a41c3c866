"""Which of our CUDA kernels ran. A strategy that does not fit the device gives way to another."""

import contextlib
from collections.abc import Iterator

from jax_bnar._kernels import targets


@contextlib.contextmanager
def launched() -> Iterator[set[str]]:
    """Yields a set that has, at the end, what was launched inside, such as "Forward cluster".

    A kernel in a CUDA graph is launched when the graph is captured, not when it is replayed.
    """
    names: set[str] = set()
    before = targets.cuda_launches()
    yield names
    now = targets.cuda_launches()
    names |= {name for name, count in now.items() if count > before.get(name, 0)}
