"""Means of polynomials in x."""

from collections.abc import Iterable
from fractions import Fraction

from jax_bnar._fuse import named_axes
from jax_bnar._fuse.polynomial import Monomial, Polynomial
from jax_bnar._fuse.unknowns import Axis, Moment, SymbolicSize, Unknowns, X

_ONE = Fraction(1)


def expectation(
    polynomial: Polynomial, over: frozenset[Axis], unknowns: Unknowns
) -> Polynomial | None:
    """The mean over some axes in moments of x, or None if moments cannot express it."""
    total = Polynomial.constant(0)
    for monomial, coefficient in polynomial.terms:
        mean = _mean(monomial, over, unknowns)
        if mean is None:
            return None
        total = total + mean.scaled(coefficient)
    return total


def _mean(monomial: Monomial, over: frozenset[Axis], unknowns: Unknowns) -> Polynomial | None:
    """The mean of a monomial: unknowns that do not vary along the axes are factors of it.

    What remains must be x, x^2 or a mean of one of them.
    """
    constant = [(u, p) for u, p in monomial if not _may_vary(u, over, unknowns)]
    varying = [(u, p) for u, p in monomial if _may_vary(u, over, unknowns)]
    factor = Polynomial.of({tuple(constant): _ONE})
    if not varying:
        return factor
    if len(varying) != 1:
        return None
    number, power = varying[0]
    unknown = unknowns[number]
    if isinstance(unknown, X) and power in (1, 2):
        return factor * unknowns.polynomial(Moment(power, over))
    if isinstance(unknown, Moment) and power == 1:
        both = named_axes.of_both(unknown.over, over)
        return None if both is None else factor * unknowns.polynomial(Moment(unknown.power, both))
    return None


def _may_vary(number: int, over: Iterable[Axis], unknowns: Unknowns) -> bool:
    """Whether an unknown may vary along the axes.

    Along mapped axes everything may, even a vector of the program, except a mean over them
    and a size. A mean over groups of an axis varies along it, but not within these groups.
    """
    unknown, axes = unknowns[number], named_axes.flat(over)
    along = unknowns.varies(number) & axes
    if isinstance(unknown, Moment):
        along -= named_axes.flat(unknown.over.intersection(over))
    if along:
        return True
    mapped = any(not isinstance(axis, int) for axis in axes)
    return mapped and not isinstance(unknown, Moment | SymbolicSize)
