"""What recognition could not cope with: the program keeps its equations, and the user is told."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jax_bnar._base import jax_compat


@dataclasses.dataclass(frozen=True)
class Failure:
    """An unforeseen error.

    Attributes:
        equation: the equation that was examined or replaced; None if it is not known.
        name_stack: that of the equation, below those of the inlined calls around it.
        error: what was raised.
    """

    equation: Any
    name_stack: Any
    error: Exception

    @property
    def line(self) -> str:
        return "an unknown line" if self.equation is None else jax_compat.source_line(self.equation)

    @property
    def reason(self) -> str:
        return (
            f"the analysis failed ({type(self.error).__name__}: {self.error}), so the program is"
            " left as it is here. This is a defect of jax_bnar: please report it, with the program"
        )


class PlaceOfError(Exception):
    """An error was raised when a node ran.

    JAX puts the program's stack in the place of an exception's cause, so the error is kept here.
    """

    def __init__(self, node: Any, error: Exception) -> None:
        super().__init__(node.name)
        self.equation = node.equation
        self.name_stack = str(node.name_stack)
        self.error = error

    def is_within(self, node: Any) -> None:
        """Says that the place is in the body of this node."""
        self.name_stack = f"{node.name_stack}/{self.name_stack}".strip("/")


@contextlib.contextmanager
def caught(failures: list[Failure], node: Any = None) -> Iterator[None]:
    """Turns an error into a failure at this node, or where a `PlaceOfError` says that it was."""
    try:
        yield
    except PlaceOfError as place:
        failures.append(Failure(place.equation, place.name_stack, place.error))
    except Exception as error:
        equation, stack = (None, "") if node is None else (node.equation, node.name_stack)
        failures.append(Failure(equation, stack, error))


def warn(failures: Sequence[Failure]) -> None:
    if not failures:
        return
    first, more = failures[0], len(failures) - 1
    also = f" (and at {more} more places, which jax_bnar.explain lists)" if more else ""
    place = f"{first.name_stack} at {first.line}".removeprefix(" ")
    warnings.warn(f"fuse: {place}{also}: {first.reason}.", RuntimeWarning, stacklevel=4)
