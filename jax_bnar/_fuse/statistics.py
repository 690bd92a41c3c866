"""The statistics of x among a program's values, and how a kernel's mean and variance give them."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar._base.jax_compat import vary_over
from jax_bnar._fuse import axes as axes_of
from jax_bnar._fuse.nodes import Value
from jax_bnar._fuse.polynomial import Polynomial
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.sizes import is_long
from jax_bnar._fuse.unknowns import Clamped, Moment, Unknowns


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A value of the program that is `factor` times a statistic of x."""

    value: Value
    name: str
    factor: Fraction


def kept_axes(region: Region, over: frozenset[Any]) -> list[int]:
    """The axes of x over which the statistics are not taken."""
    return [a for a, size in enumerate(region.x.shape) if is_long(size) and a not in over]


def statistics_of(region: Region, over: frozenset[Any]) -> Iterator[Statistic]:
    """The statistics with one number for each index of the axes of x that are kept.

    Broadcasts of them are not among the statistics.
    """
    axes, known = kept_axes(region, over), _known(region, over)
    count = math.prod(region.x.shape[a] for a in axes)
    for value, term in region.terms.items():
        if math.prod(value.shape) != count or not axes_of.in_order(term.labels, axes):
            continue
        if term.polynomial is None:
            continue
        for name, statistic in known:
            if factor := term.polynomial.over(statistic):
                yield Statistic(value, name, factor)
                break


def population_variance(over: frozenset[Any], unknowns: Unknowns) -> Polynomial:
    mean = unknowns.polynomial(Moment(1, over))
    return unknowns.polynomial(Moment(2, over)) - mean * mean


def restored(
    statistics: Sequence[Statistic],
    wanted: Collection[Value],
    mean: jax.Array,
    var: jax.Array,
    shift: jax.Array | None,
) -> list[jax.Array]:
    """Those statistics of the program that are wanted, from the kernel's results."""
    return [_restored(s, mean, var, shift) for s in statistics if s.value in wanted]


def with_nans_of(shift: jax.Array | None, vector: jax.Array | None) -> jax.Array | None:
    """The vector with NaN where the shift is not finite, because only a finite shift cancels."""
    if shift is None:
        return vector
    return 0 * shift if vector is None else vector + (0 * shift).astype(vector.dtype)


def _known(region: Region, over: frozenset[Any]) -> list[tuple[str, Polynomial]]:
    """The names and the polynomials of the statistics."""
    variance = population_variance(over, region.unknowns)
    mean = region.unknowns.polynomial(Moment(1, over)) + region.shift
    return [
        ("mean", mean),
        ("mean of squares", variance + mean * mean),
        ("var", variance),
        ("var", region.unknowns.polynomial(Clamped(variance))),
    ]


def _restored(
    statistic: Statistic, mean: jax.Array, var: jax.Array, shift: jax.Array | None
) -> jax.Array:
    """The value that the program computed itself, restored from the kernel's results."""
    if shift is not None:
        shift = jnp.broadcast_to(shift.astype(mean.dtype), mean.shape)
    if statistic.name == "var":
        array = var if shift is None else var + 0 * shift
    else:
        array = mean if shift is None else mean + shift
        if statistic.name == "mean of squares":
            array = var + array * array
    if statistic.factor != 1:
        array = array * jnp.asarray(float(statistic.factor), array.dtype)
    array = array.astype(statistic.value.dtype).reshape(statistic.value.shape)
    # In a shard_map with check_vma, the program may have declared a synchronised statistic varying.
    return vary_over(array, statistic.value.aval.manual_axis_type.varying)
