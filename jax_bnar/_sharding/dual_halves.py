"""The operations with two normalised inputs if statistics groups span devices; see `halves`."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from jax_bnar import reference
from jax_bnar._base.config import Gate
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._kernels import dual, kernel_call
from jax_bnar._sharding.collectives import Span, merge_statistics, sum_packed
from jax_bnar._sharding.halves import (
    Halves,
    Results,
    beside_coefficients,
    call,
    selected,
    with_selected,
)

ON_ONE_DEVICE: Final = Halves(
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
    options: dict[str, Any] = {
        "layout": layout,
        "implementation": implementation,
        "epsilon": epsilon,
        "gate": gate,
    }
    if gate != "x":
        bias1 = bias2 = None
    vectors = selected(span, mean1, var1, mean2, var2, scale1, bias1, scale2, bias2)
    of_gate = vectors if gate == "x" else (vectors[0], None, vectors[2], *(None,) * 5)
    sum_e, *centred = halves.backward_reduce(dy, x1, x2, saved, *of_gate, **options)
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
    coefficients: list[jax.Array] = []
    for i in range(2):
        sum_ae, sum_ae_normalised = weighted[2 * i : 2 * i + 2]
        dmean, dvar = cotangents[2 * i : 2 * i + 2]
        coefficients += reference.backward_coefficients(
            sum_ae, sum_ae_normalised, rstd[i], dmean, dvar, count=count
        )
    affine = (
        *beside_coefficients(var1, scale1, bias1),
        *beside_coefficients(var2, scale2, bias2),
    )
    dx1, dx2 = halves.backward_apply(
        *(dy, x1, x2, saved), *vectors[:4], *selected(span, *affine, *coefficients), **options
    )
    return dx1, dx2, dscale[0], dscale[1], dbias


ACROSS_DEVICES: Final[dict[str, Callable[..., Results]]] = {
    "dual_forward": forward,
    "dual_backward": backward,
    "dual_normalise": normalise,
    "dual_backward_reduce": backward_reduce,
    "dual_backward_apply": backward_apply,
}
