"""Tangents of relu(batch_norm(x1) + batch_norm(x2)) in pure JAX; see `tangents`."""

import functools
from typing import Any

import jax

from jax_bnar import dual_reference
from jax_bnar._autodiff.tangents import affine_tangent, statistics_tangents
from jax_bnar._base.config import Config, Gate
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.collectives import Span

# x1, x2, saved (what `save=` kept), mean1, var1, mean2, var2, scale1, bias1, scale2, bias2
Residuals = tuple[Any, ...]
Tangents = tuple[jax.Array | None, ...]

_VECTORS: tuple[OperandKind, ...] = ("vector",) * 8
_KINDS: tuple[OperandKind, ...] = ("tensor", "tensor", *_VECTORS)


def training_tangents(
    residuals: Residuals, tangents: Tangents, config: Config, span: Span | None = None
) -> tuple[jax.Array, ...]:
    """The tangents of (y, mean1, var1, mean2, var2).

    `tangents` are those of (x1, x2, scale1, bias1, scale2, bias2).
    If there is a `span`, the statistics of both inputs are summed over its parts.
    """
    x1, x2, saved, mean1, var1, mean2, var2, *affine = residuals
    x1_dot, x2_dot, *affine_dots = tangents
    options: dict[str, Any] = {"layout": config.layout, "span": span}
    statistics = (
        *statistics_tangents(x1, mean1, x1_dot, **options),
        *statistics_tangents(x2, mean2, x2_dot, **options),
    )
    y_dot = normalise_tangent(
        saved,
        (x1, x2, *affine, mean1, var1, mean2, var2),
        (x1_dot, x2_dot, *affine_dots, *statistics),
        layout=config.layout,
        epsilon=config.epsilon,
        gate=config.gate,
    )
    return (y_dot, *statistics)


def mapped_tangents(residuals: Residuals, tangents: tuple[Any, ...]) -> tuple[bool, ...]:
    """Whether each result of `training_tangents` varies along an axis that `vmap` maps.

    The arguments are those of `training_tangents`, each replaced by whether it is mapped.
    """
    x1, x2, _, mean1, _, mean2, *_ = residuals
    x1_dot, x2_dot, *_ = tangents
    first = mean1 if x1_dot is None else x1 or mean1 or x1_dot
    second = mean2 if x2_dot is None else x2 or mean2 or x2_dot
    return any(jax.tree.leaves((residuals, tangents))), first, first, second, second


def normalise_tangent(
    saved: jax.Array | None,
    operands: tuple[jax.Array | None, ...],
    tangents: Tangents,
    *,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
) -> jax.Array:
    """y_dot, in the dtype of x1 and rounded once.

    Operands and tangents are those of the primitive `dual_normalise`:
    (x1, x2, scale1, bias1, scale2, bias2, mean1, var1, mean2, var2).
    """
    x1, *_ = operands
    function = functools.partial(_normalise_tangent, layout=layout, epsilon=epsilon, gate=gate)
    specs = (jax.typeof(x1).sharding.spec,)
    return with_automatic_axes(function, specs, saved, *operands, *tangents)[0]


def _normalise_tangent(
    saved: jax.Array | None,
    *arrays: jax.Array | None,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
) -> tuple[jax.Array]:
    assert arrays[0] is not None
    shape, dtype = arrays[0].shape, arrays[0].dtype
    kinds: tuple[OperandKind, ...] = ("mask" if gate == "mask" else "tensor", *_KINDS, *_KINDS)
    saved, *canonical = layout.to_canonical((saved, *arrays), kinds, shape)
    x1, x2, scale1, bias1, scale2, bias2, mean1, var1, mean2, var2 = canonical[: len(_KINDS)]
    dots = canonical[len(_KINDS) :]
    x1_dot, x2_dot, scale1_dot, bias1_dot, scale2_dot, bias2_dot, *statistics = dots
    first, centred1, a1 = affine_tangent(
        x1, scale1, mean1, var1, (x1_dot, scale1_dot, bias1_dot, *statistics[:2]), epsilon
    )
    second, centred2, a2 = affine_tangent(
        x2, scale2, mean2, var2, (x2_dot, scale2_dot, bias2_dot, *statistics[2:]), epsilon
    )
    bias = dual_reference.sum_of_biases(bias1, bias2)
    y_dot = dual_reference.gated(
        (first + second).astype(dtype), saved, centred1, a1, centred2, a2, bias, gate
    )
    return layout.from_canonical([y_dot], ["tensor"], shape)[:1]  # type: ignore[return-value]
