"""Tangents of the operators in pure JAX, in the user's layout, for forward mode and second orders.

With x_dot, z_dot, ... the tangents of x, z, ..., n the number of elements of a statistics group,
and a = scale*rstd:

    mean_dot = sum(x_dot)/n    var_dot = 2*sum((x-mean)*x_dot)/n
    y_dot = a*x_dot + b*(x-mean) + k + z_dot where y > 0, else 0
    b = rstd*scale_dot - a*rstd^2*var_dot/2    k = bias_dot - a*mean_dot

The gate y > 0 is taken from `saved`, which backward reads too, so that the two agree on it for
every element. A tangent of None means zero.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar import reference
from jax_bnar._base.config import Config, Gate
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._kernels import kernel_call
from jax_bnar._sharding import halves
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.collectives import Span, sum_packed


def training_tangents(
    residuals: tuple[Any, ...],
    tangents: tuple[jax.Array | None, ...],
    config: Config,
    span: Span | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(y_dot, mean_dot, var_dot) of the training form.

    `residuals` are (x, saved, mean, var, scale, bias); `tangents` are those of (x, z, scale, bias).
    """
    x, saved, mean, var, scale, bias = residuals
    x_dot, z_dot, scale_dot, bias_dot = tangents
    mean_dot, var_dot = statistics_tangents(x, mean, x_dot, layout=config.layout, span=span)
    y_dot = normalise_tangent(
        x,
        saved,
        scale,
        bias,
        mean,
        var,
        (x_dot, z_dot, scale_dot, bias_dot, mean_dot, var_dot),
        layout=config.layout,
        epsilon=config.epsilon,
        gate=config.gate,
    )
    return y_dot, mean_dot, var_dot


def mapped_tangents(
    residuals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[bool, bool, bool]:
    """Which of (y_dot, mean_dot, var_dot) vary along a mapped axis.

    The arguments are those of `training_tangents`, with each array replaced by whether it is
    mapped over that axis.
    """
    x, _, mean, *_ = residuals
    x_dot, *_ = tangents
    of_statistics = mean if x_dot is None else x or mean or x_dot
    return any(jax.tree.leaves((residuals, tangents))), of_statistics, of_statistics


def statistics_tangents(
    x: jax.Array,
    mean: jax.Array,
    x_dot: jax.Array | None,
    *,
    layout: ChannelLayout,
    span: Span | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(mean_dot, var_dot) of shape (num_groups, C), over all parts of `span` if there is one."""
    if x_dot is None:
        return jnp.zeros_like(mean), jnp.zeros_like(mean)

    def tangents(x: jax.Array, mean: jax.Array, x_dot: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums: list[jax.Array] = list(
            halves.call(
                kernel_call.backward_reduce,
                *(x_dot, x, None, mean, None, None, None),
                layout=layout,
                implementation="xla",
                epsilon=0.0,  # gate "none" needs no rstd
                gate="none",
                has_z=False,
            )
        )
        parts: jax.Array | int = 1
        if span is not None:
            sums, parts = sum_packed(span, *sums), span.parts
        n = jnp.asarray(parts * layout.group_elements(x.shape)).astype(mean.dtype)
        n = jnp.broadcast_to(n, mean.shape)
        return sums[0] / n, 2 * sums[1] / n

    spec = jax.typeof(mean).sharding.spec
    return with_automatic_axes(tangents, (spec, spec), x, mean, x_dot)


def normalise_tangent(
    x: jax.Array,
    saved: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    tangents: tuple[
        jax.Array | None,
        jax.Array | None,
        jax.Array | None,
        jax.Array | None,
        jax.Array | None,
        jax.Array | None,
    ],
    *,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
) -> jax.Array:
    """y_dot in the dtype of x, rounded once; `tangents` are of (x, z, scale, bias, mean, var)."""
    function = functools.partial(_normalise_tangent, layout=layout, epsilon=epsilon, gate=gate)
    specs = (jax.typeof(x).sharding.spec,)
    arrays = (x, saved, scale, bias, mean, var, *tangents)
    return with_automatic_axes(function, specs, *arrays)[0]


def _normalise_tangent(
    x: jax.Array,
    saved: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *tangents: jax.Array | None,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
) -> tuple[jax.Array]:
    shape = x.shape
    vectors: tuple[OperandKind, ...] = ("vector",) * 4
    x, saved, scale, bias, mean, var = layout.to_canonical(
        (x, saved, scale, bias, mean, var),
        ("tensor", "mask" if gate == "mask" else "tensor", *vectors),
        shape,
    )
    x_dot, z_dot, scale_dot, bias_dot, mean_dot, var_dot = layout.to_canonical(
        tangents, ("tensor", "tensor", *vectors), shape
    )
    y_dot, centred, a = affine_tangent(
        x, scale, mean, var, (x_dot, scale_dot, bias_dot, mean_dot, var_dot), epsilon
    )
    if z_dot is not None:
        y_dot = y_dot + z_dot.astype(y_dot.dtype)
    y_dot = reference.gated(y_dot.astype(x.dtype), centred, saved, a, bias, gate)
    (y_dot,) = layout.from_canonical([y_dot], ["tensor"], shape)
    return (y_dot,)


def affine_tangent(
    x: jax.Array,
    scale: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    tangents: tuple[jax.Array | None, ...],
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tangent of (x-mean)*a + bias in the accumulation dtype, beside x-mean and a.

    Arrays are canonical; `tangents` are of (x, scale, bias, mean, var).
    """
    x_dot, scale_dot, bias_dot, mean_dot, var_dot = tangents
    rstd = reference.reciprocal_std(var, epsilon)
    a = reference.scaled_rstd(rstd, scale)
    centred = reference.widened(x) - reference.per_element(mean, x)
    b = k = jnp.zeros_like(a)
    if scale_dot is not None:
        b = b + rstd * scale_dot
    if var_dot is not None:
        b = b - a * (rstd * (rstd * (var_dot / 2)))  # rstd^3 itself may underflow.
    if bias_dot is not None:
        k = k + bias_dot
    if mean_dot is not None:
        k = k - a * mean_dot
    y_dot = reference.per_element(b, x) * centred + reference.per_element(k, x)
    if x_dot is not None:
        y_dot = y_dot + reference.per_element(a, x) * x_dot.astype(y_dot.dtype)
    return y_dot, centred, a
