"""Polynomials with rational coefficients, by which two spellings are recognised as equal."""

import dataclasses
from fractions import Fraction

# The numbers of the unknowns, each with its power, sorted by number. A power may be negative, which
# is a division.
Monomial = tuple[tuple[int, int], ...]

# No spelling of BatchNorm has more terms than this.
_MOST_TERMS = 16
_ONE = Fraction(1)
_SMALLEST, _LARGEST = Fraction(2) ** -149, Fraction(2) ** 128


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """A sum of monomials without zero coefficients, so that equal polynomials compare equal."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @staticmethod
    def of(terms: dict[Monomial, Fraction]) -> "Polynomial":
        return Polynomial(tuple(sorted((m, c) for m, c in terms.items() if c)))

    @staticmethod
    def constant(value: Fraction | int) -> "Polynomial":
        return Polynomial((((), Fraction(value)),) if value else ())

    @staticmethod
    def unknown(number: int, power: int = 1) -> "Polynomial":
        return Polynomial(((((number, power),), _ONE),))

    def __add__(self, other: "Polynomial") -> "Polynomial":
        terms = dict(self.terms)
        for monomial, coefficient in other.terms:
            terms[monomial] = terms.get(monomial, Fraction(0)) + coefficient
        return Polynomial.of(terms)

    def __mul__(self, other: "Polynomial") -> "Polynomial":
        terms: dict[Monomial, Fraction] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = times(left, right)
                terms[monomial] = terms.get(monomial, Fraction(0)) + a * b
        return Polynomial.of(terms)

    def __neg__(self) -> "Polynomial":
        return self.scaled(Fraction(-1))

    def __sub__(self, other: "Polynomial") -> "Polynomial":
        return self + -other

    def scaled(self, factor: Fraction) -> "Polynomial":
        return Polynomial.of({m: c * factor for m, c in self.terms})

    def over(self, other: "Polynomial") -> Fraction | None:
        """The number of which this is a multiple of another polynomial, or None."""
        if len(self.terms) != len(other.terms):
            return None
        own, others = dict(self.terms), dict(other.terms)
        if own.keys() != others.keys():
            return None
        factors = {own[monomial] / others[monomial] for monomial in own}
        return factors.pop() if len(factors) == 1 else None

    def inverse(self) -> "Polynomial | None":
        """The reciprocal, if the polynomial is a single term."""
        if len(self.terms) != 1:
            return None
        monomial, coefficient = self.terms[0]
        return Polynomial.of({tuple((u, -p) for u, p in monomial): 1 / coefficient})

    def rounded(self, tolerance: float) -> "Polynomial":
        """The polynomial with coefficients set to ±1 or ±2 that miss it by the rounding of 1/N."""
        return Polynomial.of({m: _rounded(c, tolerance) for m, c in self.terms})

    @property
    def is_unwieldy(self) -> bool:
        """Whether it has too many terms, or coefficients outside the range of float32."""
        return len(self.terms) > _MOST_TERMS or any(
            not _SMALLEST < abs(c) < _LARGEST for _, c in self.terms
        )

    @property
    def unknowns(self) -> frozenset[int]:
        return frozenset(u for monomial, _ in self.terms for u, _ in monomial)

    @property
    def as_constant(self) -> Fraction | None:
        if not self.terms:
            return Fraction(0)
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    def by_power_of(self, number: int) -> "dict[int, Polynomial]":
        """Its coefficients as a polynomial in one unknown, by the power of that unknown."""
        powers: dict[int, dict[Monomial, Fraction]] = {}
        for monomial, coefficient in self.terms:
            power = dict(monomial).get(number, 0)
            rest = tuple((u, p) for u, p in monomial if u != number)
            powers.setdefault(power, {})[rest] = coefficient
        return {power: Polynomial.of(terms) for power, terms in powers.items()}


def times(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for unknown, power in right:
        powers[unknown] = powers.get(unknown, 0) + power
    return tuple(sorted((u, p) for u, p in powers.items() if p))


def _rounded(value: Fraction, tolerance: float) -> Fraction:
    if value.denominator == 1:
        return value
    for nearest in (1, -1, 2, -2):
        if abs(value - nearest) <= abs(nearest) * tolerance:
            return Fraction(nearest)
    return value
