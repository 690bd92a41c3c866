"""Scale, bias and mean: evaluates polynomials in vectors of the program to arrays."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fuse.nodes import Value
from jax_bnar._fuse.polynomial import Polynomial
from jax_bnar._fuse.unknowns import Foreign, Unknowns


@dataclasses.dataclass(frozen=True)
class Vector:
    """One number for each channel.

    Attributes:
        polynomial: a polynomial in vectors (and scalars) of the program.
        unknowns: the unknowns of the polynomial.
        values: the vectors, in the order in which `array` takes them.
        is_neutral: whether it changes nothing, as a scale of 1 or a bias of 0.
    """

    polynomial: Polynomial
    unknowns: Unknowns
    values: tuple[Value, ...]
    is_neutral: bool

    @staticmethod
    def of(polynomial: Polynomial, unknowns: Unknowns, neutral: int) -> "Vector":
        values: dict[Value, None] = {}
        for number in sorted(polynomial.unknowns):
            unknown = unknowns[number]
            assert isinstance(unknown, Foreign)
            values[unknown.value] = None
        return Vector(polynomial, unknowns, tuple(values), polynomial.as_constant == neutral)

    def array(self, arrays: Sequence[Any], channels: int, dtype: Any) -> jax.Array | None:
        """An array of shape (channels,), or None if the vector changes nothing."""
        if self.is_neutral:
            return None
        given = dict(zip(self.values, arrays, strict=True))
        if (single := self._single()) is not None and given[single].size == channels:
            return given[single].reshape(channels)
        terms = []
        for monomial, coefficient in self.polynomial.terms:
            factors = [] if coefficient == 1 and monomial else [float(coefficient)]
            factors = [jnp.full(channels, factor, dtype) for factor in factors]
            for number, power in monomial:
                unknown = self.unknowns[number]
                assert isinstance(unknown, Foreign)
                array = given[unknown.value].astype(dtype)
                shape = (channels,) if array.size == channels else ()
                array = jnp.broadcast_to(array.reshape(shape), channels)
                factors.append(array if power == 1 else jax.lax.integer_pow(array, power))
            terms.append(functools.reduce(jax.lax.mul, factors))
        return functools.reduce(jax.lax.add, terms) if terms else jnp.zeros(channels, dtype)

    def _single(self) -> Value | None:
        """The floating-point vector to which the polynomial is equal, if there is one."""
        if len(self.polynomial.terms) != 1:
            return None
        monomial, coefficient = self.polynomial.terms[0]
        if coefficient != 1 or len(monomial) != 1 or monomial[0][1] != 1:
            return None
        value = self.values[0]
        return value if jnp.issubdtype(value.dtype, jnp.floating) else None


def arrays_of(
    vectors: Sequence[Vector], arrays: Sequence[Any], channels: int, x_dtype: Any
) -> list[jax.Array | None]:
    """The arrays of several vectors; `arrays` holds the values of each vector in turn."""
    dtype = accumulation_dtype(x_dtype)
    waiting = iter(arrays)
    return [
        vector.array([next(waiting) for _ in vector.values], channels, dtype) for vector in vectors
    ]
