"""The operations with two normalised inputs if statistics groups span devices; see `halves`."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from jax_bnar import dual_reference, reference
from jax_bnar._base.config import Gate
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._kernels import dual, kernel_call
from jax_bnar._sharding.collectives import Span, merge_statistics, sum_packed
from jax_bnar._sharding.halves import (
    Halves,
    Results,
    call,
    gate_multiplier,
    selected,
    with_selected,
)

ON_ONE_DEVICE: Final = Halves(
    functools.partial(call, kernel_call.normalise),
    functools.partial(call, dual.backward_reduce),
    functools.partial(call, dual.backward_apply),
)


def statistics_of_both(
    x1: jax.Array, x2: jax.Array, span: Span, statistics: Callable[..., Results], **options: Any
) -> Results:
    """(mean1, var1, mean2, var2) of whole groups, with one all-reduce."""
    (mean1, var1), (mean2, var2) = statistics(x1, **options), statistics(x2, **options)
    mean, var = merge_statistics(
        jnp.concatenate([mean1, mean2], axis=-1), jnp.concatenate([var1, var2], axis=-1), span
    )
    (mean1, mean2), (var1, var2) = (jnp.split(each, 2, axis=-1) for each in (mean, var))
    return mean1, var1, mean2, var2


def forward(
    x1: jax.Array,
    x2: jax.Array,
    *affine: jax.Array | None,
    span: Span,
    layout: ChannelLayout,
    implementation: Implementation,
    **statics: Any,
) -> Results:
    options: dict[str, Any] = {"layout": layout, "implementation": implementation}
    statistics = functools.partial(call, kernel_call.statistics)
    of_both = statistics_of_both(x1, x2, span, statistics, **options)
    y, *mask = normalise(x1, x2, *affine, *of_both, span=span, **options, **statics)
    return (y, *of_both, *mask)


def normalise(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    return call(dual.normalise, *with_selected(dual.normalise, operands, span), **statics)


def backward_reduce(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    own = with_selected(dual.backward_reduce, operands, span)
    return tuple(sum_packed(span, *call(dual.backward_reduce, *own, **statics)))


def backward_apply(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    own = with_selected(dual.backward_apply, operands, span)
    return call(dual.backward_apply, *own, **statics)


def backward(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    dmean1: jax.Array,
    dvar1: jax.Array,
    dmean2: jax.Array,
    dvar2: jax.Array,
    *,
    span: Span,
    layout: ChannelLayout,
    implementation: Implementation,
    epsilon: float,
    gate: Gate,
    halves: Halves = ON_ONE_DEVICE,
) -> Results:
    """(dx1, dx2, dscale1, dscale2, dbias) with one all-reduce; see `halves.backward`."""
    options: dict[str, Any] = {"layout": layout, "implementation": implementation}
    multipliers = _gate_multipliers(
        gate,
        (scale1, scale2),
        (var1, var2),
        normalise=halves.normalise,
        implementation=implementation,
        epsilon=epsilon,
    )
    bias = dual_reference.sum_of_biases(bias1, bias2) if gate == "x" else None
    gate_vectors = selected(span, mean1, multipliers[0], mean2, multipliers[1], bias)
    sum_e, *centred = halves.backward_reduce(dy, x1, x2, saved, *gate_vectors, **options, gate=gate)
    rstd = [reference.reciprocal_std(var, epsilon) for var in (var1, var2)]
    a = [reference.scaled_rstd(r, s) for r, s in zip(rstd, (scale1, scale2), strict=True)]
    given = (dmean1, dvar1, dmean2, dvar2)
    if span.shares_scale:
        (dbias, *centred), cotangents = span.sum_backward((sum_e, *centred), given)
        dscale = [r * c for r, c in zip(rstd, centred, strict=True)]
        weighted = (a[0] * dbias, a[0] * dscale[0], a[1] * dbias, a[1] * dscale[1])
    else:
        dbias, dscale = sum_e, [r * c for r, c in zip(rstd, centred, strict=True)]
        local = (a[0] * dbias, a[0] * dscale[0], a[1] * dbias, a[1] * dscale[1])
        weighted, cotangents = span.sum_backward(local, given)
    count = span.parts * layout.group_elements(x1.shape)
    coefficients = []
    for i, multiplier in enumerate(multipliers):
        sum_ae, sum_ae_normalised = weighted[2 * i : 2 * i + 2]
        dmean, dvar = cotangents[2 * i : 2 * i + 2]
        of_x = reference.backward_coefficients(
            sum_ae, sum_ae_normalised, a[i], rstd[i], dmean, dvar, count=count
        )
        coefficients.append(of_x if multiplier is None else of_x._replace(a=multiplier))
    dx1, dx2 = halves.backward_apply(
        *(dy, x1, x2, saved),
        *selected(span, mean1, *coefficients[0], mean2, *coefficients[1], bias),
        **options,
        gate=gate,
    )
    return dx1, dx2, dscale[0], dscale[1], dbias


def _gate_multipliers(
    gate: Gate,
    scales: tuple[jax.Array | None, jax.Array | None],
    variances: tuple[jax.Array, jax.Array],
    **options: Any,
) -> tuple[jax.Array | None, jax.Array | None]:
    """`halves.gate_multiplier` for both inputs, in one call."""
    if gate != "x":
        return None, None
    groups = jnp.broadcast_shapes(*(a.shape for a in (*scales, *variances) if a is not None))
    scale = None
    if any(each is not None for each in scales):
        # A scale of 1 gives the same bits as no scale.
        scale = jnp.concatenate(
            [
                jnp.ones(groups, variances[0].dtype) if s is None else jnp.broadcast_to(s, groups)
                for s in scales
            ],
            axis=-1,
        )
    var = jnp.concatenate([jnp.broadcast_to(v, groups) for v in variances], axis=-1)
    a = gate_multiplier(gate, scale, var, **options)
    assert a is not None
    a1, a2 = jnp.split(a, 2, axis=-1)
    return a1, a2


ACROSS_DEVICES: Final[dict[str, Callable[..., Results]]] = {
    "dual_forward": forward,
    "dual_backward": backward,
    "dual_normalise": normalise,
    "dual_backward_reduce": backward_reduce,
    "dual_backward_apply": backward_apply,
}
