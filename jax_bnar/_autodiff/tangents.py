"""Tangents of the operators in pure JAX, in the user's layout, for forward mode and second orders.

With x_dot, z_dot, ... the tangents of x, z, ..., n the number of elements of a statistics group,
and a = scale*rstd:

    mean_dot = sum(x_dot)/n    var_dot = 2*sum((x-mean)*(x_dot-mean_dot))/n
    y_dot = act'(u) * (sum of a*(x_dot-mean_dot) + b*(x-mean) + bias_dot over the inputs + z_dot)
    b = rstd*scale_dot - a*rstd^2*var_dot/2

For ReLU, act' is 1 where y > 0, else 0. Where it follows from y, it is taken from `saved`, which
backward reads too, so that the two agree on it for every element. A tangent of None means zero.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_bnar import reference
from jax_bnar._base.config import Config
from jax_bnar._base.element_count import element_count
from jax_bnar._base.gates import Gate
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._base.sums import total
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.collectives import Span


class Residuals(NamedTuple):
    """What backward needs of forward: the operands but for z, and `saved`, as chosen by `save=`."""

    x: Any
    saved: Any
    statistics: Any
    affine: Any


def training_tangents(
    residuals: Residuals, tangents: tuple[Any, ...], config: Config, span: Span | None = None
) -> tuple[jax.Array, ...]:
    """y_dot, followed by mean_dot and var_dot of each input, of the training form.

    `tangents` are those of (x, z, affine).
    """
    x_dot, z_dot, affine_dot = tangents
    statistics_dot = tuple(
        statistics_tangents(x_i, statistics_i.mean, x_dot_i, layout=config.layout, span=span)
        for x_i, statistics_i, x_dot_i in zip(residuals.x, residuals.statistics, x_dot, strict=True)
    )
    y_dot = normalise_tangent(
        residuals,
        (x_dot, z_dot, affine_dot, statistics_dot),
        layout=config.layout,
        epsilon=config.epsilon,
        gate=config.gate,
        out_dtype=config.out_dtype,
        **config.activation_statics,
    )
    return y_dot, *jax.tree.leaves(statistics_dot)


def mapped_tangents(residuals: Residuals, tangents: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which of the results of `training_tangents` vary along a mapped axis.

    The arguments are those of `training_tangents`, with each array replaced by whether it is
    mapped over that axis.
    """
    x_dot, *_ = tangents
    y_varies = any(jax.tree.leaves((residuals, tangents)))
    inputs = zip(residuals.x, residuals.statistics, x_dot, strict=True)
    of_statistics = (
        statistics_i.mean if x_dot_i is None else x_i or statistics_i.mean or x_dot_i
        for x_i, statistics_i, x_dot_i in inputs
    )
    return y_varies, *(varies for varies_i in of_statistics for varies in (varies_i, varies_i))


def statistics_tangents(
    x: jax.Array,
    mean: jax.Array,
    x_dot: jax.Array | None,
    *,
    layout: ChannelLayout,
    span: Span | None = None,
) -> Statistics:
    """Those of an input, of shape (num_groups, C), over all parts of `span` if there is one.

    mean_dot in var_dot would cancel if mean were exact. It is rounded, so that sum(x-mean) is not
    0, and would multiply what the elements of x_dot have in common, such as a mean of their own.
    The price is a pass over x_dot, and with a span a second all-reduce.
    """
    if x_dot is None:
        return Statistics(jnp.zeros_like(mean), jnp.zeros_like(mean))

    def tangents(x: jax.Array, mean: jax.Array, x_dot: jax.Array) -> Sequence[jax.Array]:
        parts = 1 if span is None else span.parts
        n = element_count(parts, *layout.group_sizes(x.shape), dtype=mean.dtype)
        arrays = layout.to_canonical([x, x_dot, mean], ["tensor", "tensor", "vector"], x.shape)
        x, x_dot, mean = arrays

        def mean_of(array: jax.Array) -> jax.Array:
            summed = total(array, reference.REDUCED)
            summed = summed if span is None else span.sum(summed)
            return summed / jnp.broadcast_to(n, summed.shape)

        (centred,) = reference.centred_inputs((x,), (Statistics(mean, None),))
        x_dot = reference.widened(x_dot)
        mean_dot = mean_of(x_dot)
        var_dot = 2 * mean_of(centred * (x_dot - reference.per_element(mean_dot, x_dot)))
        return layout.from_canonical([mean_dot, var_dot], ["vector", "vector"], shape)

    shape, spec = x.shape, jax.typeof(mean).sharding.spec
    return Statistics(*with_automatic_axes(tangents, (spec, spec), x, mean, x_dot))


def normalise_tangent(
    residuals: Residuals,
    tangents: tuple[Any, ...],
    *,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
    out_dtype: Any = None,
    **activation: Any,
) -> jax.Array:
    """y_dot in the dtype of y, rounded once; `tangents` are of (x, z, affine, statistics)."""
    function = functools.partial(
        _normalise_tangent,
        layout=layout,
        epsilon=epsilon,
        gate=gate,
        out_dtype=out_dtype,
        **activation,
    )
    specs = (jax.typeof(residuals.x[0]).sharding.spec,)
    return with_automatic_axes(function, specs, residuals, tangents)[0]


def _normalise_tangent(
    residuals: Residuals,
    tangents: tuple[Any, ...],
    *,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
    out_dtype: Any,
    **activation: Any,
) -> tuple[jax.Array]:
    shape = residuals.x[0].shape
    dtype = out_dtype or residuals.x[0].dtype

    def canonical(kind: OperandKind, arrays: Any) -> Any:
        return jax.tree.map(lambda array: layout.to_canonical([array], [kind], shape)[0], arrays)

    x = canonical("tensor", residuals.x)
    saved = canonical("mask" if gate == "mask" else "tensor", residuals.saved)
    statistics, affine = canonical("vector", (residuals.statistics, residuals.affine))
    (x_dot, z_dot), (affine_dot, statistics_dot) = (
        canonical("tensor", tangents[:2]),
        canonical("vector", tangents[2:]),
    )
    centred = reference.centred_inputs(x, statistics)
    a = reference.multipliers(statistics, affine, epsilon)
    dots = (
        _affine_tangent(centred_i, affine_i, statistics_i, epsilon, *dots_i)
        for centred_i, affine_i, statistics_i, *dots_i in zip(
            *(centred, affine, statistics, x_dot, affine_dot, statistics_dot), strict=True
        )
    )
    y_dot = functools.reduce(jnp.add, dots)
    if z_dot is not None:
        y_dot = y_dot + z_dot.astype(y_dot.dtype)
    bias = reference.sum_of_biases(affine)
    y_dot = reference.gated(y_dot, centred, saved, a, bias, gate, dtype=dtype, **activation)
    (y_dot,) = layout.from_canonical([y_dot.astype(dtype)], ["tensor"], shape)
    return (y_dot,)


def _affine_tangent(
    centred: jax.Array,
    affine: Affine,
    statistics: Statistics,
    epsilon: float,
    x_dot: jax.Array | None,
    affine_dot: Affine,
    statistics_dot: Statistics,
) -> jax.Array:
    """The tangent of (x-mean)*a + bias of an input, canonical, in the accumulation dtype."""
    rstd = reference.reciprocal_std(statistics.var, epsilon)
    a = reference.scaled_rstd(rstd, affine.scale)
    factor = offset = jnp.zeros_like(a)
    if affine_dot.scale is not None:
        factor = factor + rstd * affine_dot.scale
    if statistics_dot.var is not None:
        # rstd^3 itself may underflow.
        factor = factor - a * (rstd * (rstd * (statistics_dot.var / 2)))
    if affine_dot.bias is not None:
        offset = offset + affine_dot.bias
    if x_dot is None and statistics_dot.mean is not None:
        offset = offset - a * statistics_dot.mean
    y_dot = reference.per_element(offset, centred)
    if affine_dot.scale is not None or statistics_dot.var is not None:
        # Otherwise an infinite x would be multiplied by 0.
        y_dot = y_dot + reference.per_element(factor, centred) * centred
    if x_dot is not None:
        wide = x_dot.astype(y_dot.dtype)
        if statistics_dot.mean is not None:
            # In this order, what all elements of x_dot have in common leaves no rounding error.
            wide = wide - reference.per_element(statistics_dot.mean, wide)
        y_dot = y_dot + reference.per_element(a, centred) * wide
    return y_dot
