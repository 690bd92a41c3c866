"""One Ctrl-C ends a benchmark, also while Python is collecting garbage."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """Remembers an interrupt that Python could not raise."""

    def __init__(self) -> None:
        self._swallowed = False

    def note(self) -> None:
        self._swallowed = True

    def check(self) -> None:
        """Raises the interrupt, if there was one."""
        if self._swallowed:
            self._swallowed = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def noticed_interrupts() -> Iterator[Interrupts]:
    """Notices a KeyboardInterrupt inside a callback of the garbage collector or a finalizer.

    JAX adds such a callback, `_xla_gc_callback`. Python runs the handler of the signal in whatever
    Python code comes next. Where no exception can leave that code, Python prints it and goes on, so
    a benchmark would run to its end.
    """
    interrupts = Interrupts()
    hook = sys.unraisablehook

    def note(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            interrupts.note()
        else:
            hook(unraisable)

    sys.unraisablehook = note
    try:
        yield interrupts
    finally:
        sys.unraisablehook = hook
    interrupts.check()
