"""Scale, bias and mean: evaluates polynomials in vectors of the program to arrays."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fuse.nodes import Value
from jax_bnar._fuse.polynomial import Polynomial
from jax_bnar._fuse.unknowns import Foreign, Unknowns


@dataclasses.dataclass(frozen=True)
class Vector:
    """One number for each channel, and for each index of the axes that a `vmap` has added.

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

    def array(
        self, arrays: Sequence[Any], sizes: Mapping[int, int], dtype: Any
    ) -> jax.Array | None:
        """An array with these axes of x, in this order, or None if the vector changes nothing."""
        if self.is_neutral:
            return None
        shape = tuple(sizes.values())
        given = dict(zip(self.values, arrays, strict=True))
        if (single := self._single()) is not None:
            array = _arranged(given[single.value], single, sizes)
            if array.shape == shape:
                return array
        terms = []
        for monomial, coefficient in self.polynomial.terms:
            factors = [] if coefficient == 1 and monomial else [float(coefficient)]
            factors = [jnp.full(shape, factor, dtype) for factor in factors]
            for number, power in monomial:
                unknown = self.unknowns[number]
                assert isinstance(unknown, Foreign)
                array = _arranged(given[unknown.value].astype(dtype), unknown, sizes)
                array = jnp.broadcast_to(array, shape)
                factors.append(array if power == 1 else jax.lax.integer_pow(array, power))
            terms.append(functools.reduce(jax.lax.mul, factors))
        return functools.reduce(jax.lax.add, terms) if terms else jnp.zeros(shape, dtype)

    def _single(self) -> Foreign | None:
        """The floating-point vector to which the polynomial is equal, if there is one."""
        if len(self.polynomial.terms) != 1:
            return None
        monomial, coefficient = self.polynomial.terms[0]
        if coefficient != 1 or len(monomial) != 1 or monomial[0][1] != 1:
            return None
        unknown = self.unknowns[monomial[0][0]]
        assert isinstance(unknown, Foreign)
        return unknown if jnp.issubdtype(unknown.value.dtype, jnp.floating) else None


def _arranged(array: jax.Array, unknown: Foreign, sizes: Mapping[int, int]) -> jax.Array:
    """The array with these axes of x, in this order; those that it lacks have the size 1."""
    own = [axis for axis in unknown.axes if axis is not None and axis in sizes]
    array = array.reshape([sizes[axis] for axis in own])
    wanted = [axis for axis in sizes if axis in own]
    if own != wanted:
        array = array.transpose([own.index(axis) for axis in wanted])
    return array.reshape([size if axis in own else 1 for axis, size in sizes.items()])


def arrays_of(
    vectors: Sequence[Vector], arrays: Sequence[Any], sizes: Mapping[int, int], x_dtype: Any
) -> list[jax.Array | None]:
    """The arrays of several vectors, with one value for each index of the axes of x in `sizes`.

    `arrays` holds the values of each vector in turn.
    """
    dtype = accumulation_dtype(x_dtype)
    waiting = iter(arrays)
    return [
        vector.array([next(waiting) for _ in vector.values], sizes, dtype) for vector in vectors
    ]
