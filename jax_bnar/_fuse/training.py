"""Batch statistics: which values of a region are the normalisation of x by its own statistics."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

from jax.export import is_symbolic_dim

from jax_bnar._fuse import axes as axes_of
from jax_bnar._fuse.dtypes import holds
from jax_bnar._fuse.named_axes import GroupedAxis
from jax_bnar._fuse.nodes import Value
from jax_bnar._fuse.polynomial import Monomial, Polynomial
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.sizes import is_at_least, is_long
from jax_bnar._fuse.statistics import kept_axes, population_variance
from jax_bnar._fuse.unknowns import Clamped, Foreign, Moment, ReciprocalRoot, Unknowns

OF_EACH_EXAMPLE: Final = (
    "the statistics are those of each example, not of the batch, as in LayerNorm or GroupNorm"
)
_UNDER_A_VMAP: Final = "; where they are those of several batches under a vmap, write vmap(fuse(f))"


# Where each example has statistics of its own, a kernel gains nothing from fewer elements of each
# channel.
_FEWEST_OF_EXAMPLES: Final = 32


class RefusalError(Exception):
    """A value cannot be taken; the message, which says why, goes into the report."""


class UsedElsewhereError(RefusalError):
    """A value could be taken if nothing else read an array that the kernel does not compute."""


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """`scale * (x - mean) * rsqrt(var + epsilon) + bias`, with the mean and the variance of x.

    Attributes:
        scale: a polynomial in vectors of the program.
        bias: a polynomial in vectors of the program.
        shift: what the program adds to x first, as such a polynomial; it cancels everywhere except
            in the mean.
        epsilon: what the program adds to the variance.
        axis: the channel axis of x.
        order: the axes of x that are longer than 1, in the order of the normalised array.
        result_axis: the channel axis of the normalised array.
        num_groups: the number of groups of a ghost batch, otherwise 1.
        groups_are_apart: whether the groups have a separate axis in the normalised array.
        vmapped: the axes of x along which each index is normalised by itself, as by a `vmap` over
            parameters. The normalised array begins with them.
        axis_name: the mapped axes over which the statistics are taken.
        axis_index_groups: the groups of indices of these axes that have their own statistics, or
            None.
        over: all axes over which they are taken.
        dtype: the dtype of the normalised array. x may be narrower; it is then first widened, which
            is exact.
    """

    scale: Polynomial
    bias: Polynomial
    shift: Polynomial
    epsilon: float
    axis: int
    order: tuple[int, ...]
    result_axis: int
    num_groups: int
    groups_are_apart: bool
    vmapped: tuple[int, ...]
    axis_name: tuple[Any, ...]
    axis_index_groups: tuple[tuple[int, ...], ...] | None
    over: frozenset[Any]
    dtype: Any


def normalisation(region: Region, value: Value) -> Normalisation:
    """The normalisation that a value of the region is; raises RefusalError if it is none."""
    term = region.terms[value]
    polynomial = term.polynomial
    if polynomial is None:
        raise RefusalError("several arrays are stacked in one")
    unknowns = region.unknowns
    parts = polynomial.by_power_of(region.x_number)
    if set(parts) - {0, 1} or 1 not in parts:
        raise RefusalError("the result is not a multiple of x plus a vector")
    slope, rest = parts[1], parts.get(0, Polynomial.constant(0))
    root = _root(slope, unknowns)
    epsilon, over = _variance(root, unknowns)
    names, groups = mapped(region, over)
    inverse = unknowns.polynomial(root, -1)
    scale = slope * inverse
    bias = rest + slope * unknowns.polynomial(Moment(1, over))
    vectors = {"scale": scale, "bias": bias, "shift": region.shift}
    for name, vector in vectors.items():
        if not unknowns.are_foreign(vector):
            raise RefusalError(_not_foreign(name, vector, unknowns))
    parameters = unknowns.polynomial_varies(scale) | unknowns.polynomial_varies(bias)
    are_examples = False
    if vmapped := _vmapped(region, over, parameters, term.labels):
        axis, num_groups = kept_axes(region, over)[-1], 1
    elif are_examples := _are_examples(region, over, parameters):
        axis, num_groups = kept_axes(region, over)[-1], region.x.shape[0]
    else:
        axis, num_groups = channels(region, over, parameters)
    for name, vector in vectors.items():
        if unknowns.polynomial_varies(vector) - {*vmapped, axis}:
            raise RefusalError(f"the {name} does not have one value per channel")
    order, result_axis = _arrangement(term.labels, region.x.shape, value.shape, axis, num_groups)
    if not holds(value.dtype, region.stored.dtype):
        raise RefusalError(
            f"the normalised array is {value.dtype} where x is {region.stored.dtype}"
        )
    return Normalisation(
        scale=scale,
        bias=bias,
        shift=region.shift,
        epsilon=epsilon,
        axis=axis,
        order=order,
        result_axis=result_axis,
        num_groups=num_groups,
        groups_are_apart=term.labels[0] == (0,) and not are_examples,
        vmapped=vmapped,
        axis_name=names,
        axis_index_groups=groups,
        over=over,
        dtype=value.dtype,
    )


def _root(slope: Polynomial, unknowns: Unknowns) -> ReciprocalRoot:
    """The one 1/sqrt among the factors of x."""
    found: set[ReciprocalRoot] = set()
    for monomial, _ in slope.terms:
        here = [
            (unknown, power)
            for number, power in monomial
            if isinstance(unknown := unknowns[number], ReciprocalRoot)
        ]
        if len(here) != 1 or here[0][1] != 1:
            raise RefusalError("x is not divided by a standard deviation")
        found.add(here[0][0])
    if len(found) != 1:
        raise RefusalError("x is divided by several standard deviations")
    return found.pop()


def _variance(root: ReciprocalRoot, unknowns: Unknowns) -> tuple[float, frozenset[Any]]:
    """Epsilon and the axes of the statistics.

    Raises RefusalError if the root is not that of var + epsilon.
    """
    parts = dict(root.of.terms)
    epsilon = parts.pop((), Fraction(0))
    variance = Polynomial.of(parts)
    if len(variance.terms) == 1 and isinstance(
        clamped := unknowns[variance.terms[0][0][0][0]], Clamped
    ):
        if variance != unknowns.polynomial(clamped):
            raise RefusalError("the variance is a multiple of the population variance of x")
        variance = clamped.of
        if variance.terms and dict(variance.terms).get(()):
            raise RefusalError("the variance is clamped at a value other than 0")
    moments = {
        unknown for number in variance.unknowns if isinstance(unknown := unknowns[number], Moment)
    }
    if any(isinstance(unknowns[number], Foreign) for number in variance.unknowns):
        if not moments and not any(isinstance(unknowns[n], Clamped) for n in variance.unknowns):
            raise RefusalError("the variance does not come from x, so this is evaluation")
        if any(_scales_a_variance(monomial, unknowns) for monomial, _ in variance.terms):
            raise RefusalError(
                "the variance is multiplied with an array that is not computed from x, such as"
                " running statistics (BatchRenorm) or the number of elements that a mask selects"
            )
        raise RefusalError("epsilon is not a constant, or the variance is not that of x alone")
    seconds = {moment for moment in moments if moment.power == 2}
    if len(seconds) != 1:
        raise RefusalError("the variance is not that of x")
    over = next(iter(seconds)).over
    population = population_variance(over, unknowns)
    if variance != population:
        if factor := variance.over(population):
            raise RefusalError(
                f"the variance is {float(factor):.6g} times the population variance of x, as with"
                " ddof or another count"
            )
        raise RefusalError(
            "the variance is not the population variance of x: another count (ddof), another"
            " centre, or other axes than those of the mean"
        )
    if epsilon <= 0:
        raise RefusalError("no positive epsilon is added to the variance")
    return float(epsilon), over


def _scales_a_variance(monomial: Monomial, unknowns: Unknowns) -> bool:
    """Whether a vector of the program is a factor of a statistic of x."""
    kinds = {type(unknowns[number]) for number, _ in monomial}
    return Foreign in kinds and bool(kinds & {Moment, Clamped})


def _not_foreign(name: str, vector: Polynomial, unknowns: Unknowns) -> str:
    if any(isinstance(unknowns[n], Moment) for n in vector.unknowns):
        return f"the mean that is subtracted is not that of x, or the {name} depends on it"
    return f"the {name} depends on the statistics"


def channels(
    region: Region, over: frozenset[Any], parameters: frozenset[Any] = frozenset()
) -> tuple[int, int]:
    """The channel axis and the number of groups of the statistics.

    `parameters` are the axes along which scale and bias differ. They tell whether the first axis is
    that of the channels, or of examples that have statistics of their own, as in LayerNorm.
    """
    shape = region.x.shape
    kept = kept_axes(region, over)
    if not kept:
        ones = [axis for axis, size in enumerate(shape) if size == 1]
        if not ones:
            raise RefusalError(
                "the statistics are taken over all axes, so there is no channel axis"
            )
        return ones[-1], 1
    if len(kept) == 1 and (kept[0] > 0 or shape[0] == 1 or parameters == frozenset(kept)):
        return kept[0], 1
    if len(kept) == 2 and kept[0] == 0 and kept[1] >= 2 and _is_ghost(region.x):
        return kept[1], shape[0]
    if kept[0] == 0:
        # A LayerNorm sums over the last axes, and a batch comes before its channels.
        is_layer_norm = kept == list(range(len(kept)))
        raise RefusalError(OF_EACH_EXAMPLE + ("" if is_layer_norm else _UNDER_A_VMAP))
    raise RefusalError(
        f"there are statistics along several axes {tuple(kept)}, not one per channel"
    )


def _vmapped(
    region: Region, over: frozenset[Any], parameters: frozenset[Any], labels: axes_of.Labels
) -> tuple[int, ...]:
    """The axes that a `vmap` over the parameters has added; empty if there are none.

    Statistics of each example, as in InstanceNorm, have the same axes, but parameters in common.
    The kernels compute them too if each example has parameters of its own. In the normalised array
    these axes come first, because the operators would have to move others there.
    """
    kept = kept_axes(region, over)
    outer = tuple(kept[:-1])
    if parameters != frozenset(kept) or labels[: len(outer)] != tuple((a,) for a in outer):
        return ()
    return outer


def _are_examples(region: Region, over: frozenset[Any], parameters: frozenset[Any]) -> bool:
    """Whether each example has statistics of its own and shares the parameters: an InstanceNorm.

    To the operators it is a ghost batch whose groups are of one example. What tells it from a
    LayerNorm is that the channels come last, or that they come first and have parameters.
    """
    kept, shape = kept_axes(region, over), region.x.shape
    if len(kept) != 2 or kept[0] != 0 or _is_ghost(region.x):
        return False
    inner = [axis for axis, size in enumerate(shape) if is_long(size) and axis not in kept]
    if not inner:
        return False
    comes_first = min(inner) > kept[1] and parameters == {kept[1]}
    if not comes_first and max(inner) > kept[1]:
        return False
    if is_symbolic_dim(shape[0]):
        raise RefusalError(
            f"the statistics are those of each example, whose number is symbolic ({shape[0]})"
        )
    if not is_at_least(math.prod(shape[axis] for axis in inner), _FEWEST_OF_EXAMPLES):
        raise RefusalError(
            f"the statistics are those of each example, of fewer than {_FEWEST_OF_EXAMPLES}"
            " elements, which XLA computes as fast"
        )
    return parameters <= {kept[1]}


def mapped(
    region: Region, over: frozenset[Any]
) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...] | None]:
    """The names and the groups of the mapped axes over which the statistics are taken."""
    names = tuple(name for name in region.axis_sizes if name in over)
    grouped = [axis for axis in over if isinstance(axis, GroupedAxis)]
    if not grouped:
        return names, None
    if names or len(grouped) > 1:
        raise RefusalError(
            "the statistics are taken over groups of one named axis and over another axis as well;"
            " an operator takes axis_index_groups over both names at once"
        )
    return grouped[0].names, grouped[0].groups


def _arrangement(
    labels: axes_of.Labels,
    x_shape: Sequence[int],
    shape: Sequence[int],
    axis: int,
    num_groups: int,
) -> tuple[tuple[int, ...], int]:
    """The order of x's axes in the normalised array, and its channel axis."""
    order = tuple(a for label in labels for a in label)
    real = [a for a, size in enumerate(x_shape) if is_long(size)]
    if sorted(order) != real or (num_groups > 1 and list(order) != real):
        raise RefusalError(
            "the normalised array lacks an axis of x, or does not keep its groups apart"
        )
    if any(not label and is_long(size) for label, size in zip(labels, shape, strict=True)):
        raise RefusalError("the normalised array is repeated along an axis that x does not have")
    if (axis,) in labels:
        return order, labels.index((axis,))
    ones = [a for a, size in enumerate(shape) if size == 1]
    if axis in order or not ones:
        raise RefusalError("the normalised array merges the channels with another axis")
    return order, ones[-1]


def _is_ghost(x: Value) -> bool:
    """Whether x is a batch whose leading axis was split into groups."""
    node = x.producer
    if node is None or node.name != "reshape":
        return False
    before, after = node.inputs[0].shape, x.shape
    return is_long(after[1]) and before[0] == after[0] * after[1] and before[1:] == after[2:]
