"""The unknowns of a region's polynomials: x, its moments, vectors of the program, and roots."""

import dataclasses
from typing import Any

from jax.export import is_symbolic_dim

from jax_bnar._base import jax_compat
from jax_bnar._fuse.named_axes import Axis
from jax_bnar._fuse.nodes import Value
from jax_bnar._fuse.polynomial import Polynomial
from jax_bnar._fuse.sizes import Size


@dataclasses.dataclass(frozen=True)
class X:
    """The array whose normalisation is sought."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """The mean of x (power 1) or of its square (power 2) over some axes."""

    power: int
    over: frozenset[Axis]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """An array that is not computed from x; `axes` has, for each of its axes, the axis of x."""

    value: Value
    axes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class SymbolicSize:
    """A size of which only the name is known (jax.export)."""

    expression: Any


@dataclasses.dataclass(frozen=True)
class ReciprocalRoot:
    """1/sqrt(of)."""

    of: Polynomial


@dataclasses.dataclass(frozen=True)
class Clamped:
    """max(0, of)."""

    of: Polynomial


Unknown = X | Moment | Foreign | SymbolicSize | ReciprocalRoot | Clamped


class Unknowns:
    """Numbers the unknowns, and says along which axes each one varies."""

    def __init__(self, axes_of_x: frozenset[Axis]) -> None:
        self._axes_of_x = axes_of_x
        self._numbers: dict[Unknown, int] = {}
        self._unknowns: list[Unknown] = []
        self._varies: list[frozenset[Axis]] = []

    def __getitem__(self, number: int) -> Unknown:
        return self._unknowns[number]

    def __len__(self) -> int:
        return len(self._unknowns)

    def number(self, unknown: Unknown) -> int:
        if unknown not in self._numbers:
            self._numbers[unknown] = len(self._unknowns)
            self._unknowns.append(unknown)
            self._varies.append(self._axes_along(unknown))
        return self._numbers[unknown]

    def polynomial(self, unknown: Unknown, power: int = 1) -> Polynomial:
        return Polynomial.unknown(self.number(unknown), power)

    def size(self, size: Size) -> Polynomial:
        """A size as a number, or as the product of a number and the unknowns in its name."""
        if not is_symbolic_dim(size):
            return Polynomial.constant(size)
        number, factors = jax_compat.symbolic_factors(size)
        product = Polynomial.constant(number)
        for expression, power in factors:
            product = product * self.polynomial(SymbolicSize(expression), power)
        return product

    def varies(self, number: int) -> frozenset[Axis]:
        return self._varies[number]

    def polynomial_varies(self, polynomial: Polynomial) -> frozenset[Axis]:
        return frozenset().union(*(self._varies[n] for n in polynomial.unknowns))

    def are_foreign(self, polynomial: Polynomial) -> bool:
        return all(isinstance(self._unknowns[n], Foreign) for n in polynomial.unknowns)

    def _axes_along(self, unknown: Unknown) -> frozenset[Axis]:
        if isinstance(unknown, X):
            return self._axes_of_x
        if isinstance(unknown, Moment):
            return self._axes_of_x - unknown.over
        if isinstance(unknown, Foreign):
            return frozenset(axis for axis in unknown.axes if axis is not None)
        if isinstance(unknown, SymbolicSize):
            return frozenset()
        return self.polynomial_varies(unknown.of)
