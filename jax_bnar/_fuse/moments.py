"""Means of polynomials in x."""

from collections.abc import Iterable
from fractions import Fraction

from jax_bnar._fuse.polynomial import Monomial, Polynomial
from jax_bnar._fuse.unknowns import Axis, Moment, Unknowns, X

_ONE = Fraction(1)


def expectation(
    polynomial: Polynomial, over: frozenset[Axis], unknowns: Unknowns
) -> Polynomial | None:
    """The mean over some axes, in moments of x; None where it is not a matter of moments."""
    total = Polynomial.constant(0)
    for monomial, coefficient in polynomial.terms:
        mean = _mean(monomial, over, unknowns)
        if mean is None:
            return None
        total = total + mean.scaled(coefficient)
    return total


def _mean(monomial: Monomial, over: frozenset[Axis], unknowns: Unknowns) -> Polynomial | None:
    """What does not vary along the axes is a factor; the rest must be x, x^2 or a mean of them."""
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
        return factor * unknowns.polynomial(Moment(unknown.power, unknown.over | over))
    return None


def _may_vary(number: int, over: Iterable[Axis], unknowns: Unknowns) -> bool:
    """Along mapped axes anything but a mean over them may vary, an array of the program too."""
    if unknowns.varies(number) & frozenset(over):
        return True
    mapped = any(not isinstance(axis, int) for axis in over)
    return mapped and not isinstance(unknowns[number], Moment)
