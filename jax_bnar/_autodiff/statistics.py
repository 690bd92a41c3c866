"""Mean and variance of x in the user's layout, alone, with their derivatives.

With n the number of elements of a statistics group, on all devices that share it:

    mean_dot = sum(x_dot)/n     var_dot = 2*sum((x-mean)*x_dot)/n
    dx = dmean/n + 2*dvar*(x-mean)/n

Both are plain JAX, dx in the user's layout: it is elementwise, so XLA computes it in the loop that
adds it to the other gradients of x. A kernel would write it to memory once more.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.named_call import named_call
from jax_bnar._autodiff.remat import STATISTICS_NAME
from jax_bnar._autodiff.tangents import statistics_tangents
from jax_bnar._base.element_count import element_count
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Statistics
from jax_bnar._base.jax_compat import varying_axes
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._sharding import halves
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.collectives import NamedSpan, parts_of
from jax_bnar.reference import widened

_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
_Pair = tuple[jax.Array, ...]  # mean and var, or their tangents or cotangents


def batch_statistics(
    x: jax.Array,
    layout: ChannelLayout,
    implementation: Implementation,
    names: _Names,
    groups: _Groups,
    centre: jax.Array | None = None,
) -> Statistics:
    """Mean and var, of shape (num_groups, C), taken over the axes `names` if there are any.

    `centre` has values near the means. It is given if x was made for this call alone, so that XLA
    can sum x as it makes it. It is not differentiated, and not used if axes are named.
    """
    if not names:
        return _of_array(x, centre, layout, implementation)
    return Statistics(*named_call(_Synchronised(layout, implementation, names, groups), x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _of_array(
    x: jax.Array,
    centre: jax.Array | None,
    layout: ChannelLayout,
    implementation: Implementation,
) -> Statistics:
    options: dict[str, Any] = {"layout": layout, "implementation": implementation}
    if centre is None:
        return primitive.OPERATIONS[1].statistics(x, **options)
    return primitive.OPERATIONS[1].statistics_around(x, centre, **options)


@_of_array.defjvp
def _of_array_jvp(
    layout: ChannelLayout,
    implementation: Implementation,
    primals: tuple[jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, jax.Array | None],
) -> tuple[Statistics, Statistics]:
    """Like the rule of the training form, see `jax_bnar._autodiff.training`."""
    (x, centre), (x_dot, _) = primals, tangents
    statistics = checkpoint_name(_of_array(x, centre, layout, implementation), STATISTICS_NAME)
    dots = linear_call(_Tangent(layout), (x, statistics.mean), x_dot, statistics)
    return statistics, Statistics(*dots)


@dataclasses.dataclass(frozen=True)
class _Tangent(LocalMap):
    """The linear map from x_dot to mean_dot and var_dot; its residuals are x and mean."""

    layout: ChannelLayout

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return (any(jax.tree.leaves((residuals, tangents))),) * 2

    def tangent(self, residuals: Any, tangents: jax.Array) -> _Pair:
        x, mean = residuals
        return tuple(statistics_tangents(x, mean, tangents, layout=self.layout))

    def transpose(self, residuals: Any, cotangents: _Pair) -> jax.Array:
        x, mean = residuals
        return _gradient(x, mean, cotangents, self.layout)


@dataclasses.dataclass(frozen=True)
class _Synchronised:
    """The function from x to its statistics over named axes, by one all-reduce."""

    layout: ChannelLayout
    implementation: Implementation
    names: _Names
    groups: _Groups

    def value(self, operands: jax.Array) -> _Pair:
        return tuple(self._merged(operands)[0])

    def derivative(self, operands: jax.Array, tangents: jax.Array) -> tuple[_Pair, _Pair]:
        merged, parts = self._merged(operands)
        statistics = checkpoint_name(merged, STATISTICS_NAME)
        # `parts` is saved for the reason given in `jax_bnar._autodiff.synchronised`.
        residuals = (operands, statistics.mean, parts)
        linear_map = _SynchronisedTangent(self.layout, self.names, self.groups)
        return tuple(statistics), linear_call(linear_map, residuals, tangents, statistics)

    def _merged(self, x: jax.Array) -> tuple[Statistics, jax.Array | int]:
        parts = parts_of(self.names, self.groups)
        (statistics,) = halves.statistics_of_groups(
            (x,),
            NamedSpan(self.names, self.groups, parts),
            primitive.OPERATIONS[1].statistics,
            layout=self.layout,
            implementation=self.implementation,
        )
        return statistics, parts

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        # Along an axis in `names`, all examples share the same statistics.
        return (bool(operands) and not self.sees(axis_name),) * 2

    def of_all_examples(self, axis_name: Any, operands: Any) -> Callable[[Any], _Pair] | None:
        # The groups of all examples would not lie side by side.
        if not self.sees(axis_name) or self.groups is not None or self.layout.num_groups > 1:
            return None
        if not operands:
            return None
        names = tuple(name for name in self.names if name != axis_name)
        layout = dataclasses.replace(self.layout, axis=self.layout.axis + 1)
        return lambda x: tuple(batch_statistics(x, layout, self.implementation, names, None))


@dataclasses.dataclass(frozen=True)
class _SynchronisedTangent:
    """The linear map from x_dot to mean_dot and var_dot; its residuals are x, mean and parts."""

    layout: ChannelLayout
    names: _Names
    groups: _Groups

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        varies = any(jax.tree.leaves((residuals, tangents)))
        return (varies and not self.sees(axis_name),) * 2

    def tangent(self, residuals: Any, tangents: jax.Array) -> _Pair:
        x, mean, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        return tuple(statistics_tangents(x, mean, tangents, layout=self.layout, span=span))

    def transpose(self, residuals: Any, cotangents: _Pair) -> jax.Array:
        x, mean, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        of_groups = span.sum_cotangents(cotangents, varying_axes(x))
        return _gradient(x, mean, of_groups, self.layout, parts)


def _gradient(
    x: jax.Array,
    mean: jax.Array,
    cotangents: _Pair,
    layout: ChannelLayout,
    parts: jax.Array | int = 1,
) -> jax.Array:
    """dx in the dtype of x, rounded once."""

    def gradient(
        x: jax.Array, mean: jax.Array, dmean: jax.Array, dvar: jax.Array
    ) -> tuple[jax.Array]:
        n = element_count(parts, *layout.group_sizes(x.shape), dtype=mean.dtype)
        n = jnp.broadcast_to(n, mean.shape)
        mean, k, b = (layout.per_element(vector, x) for vector in (mean, dmean / n, 2 * (dvar / n)))
        return ((b * (widened(x) - mean) + k).astype(x.dtype),)

    return with_automatic_axes(gradient, (jax.typeof(x).sharding.spec,), x, mean, *cotangents)[0]
