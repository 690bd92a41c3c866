"""The operations on the arrays of one device, in the user's layout.

If every statistics group lies on one device, each operation is one kernel call. If groups span
devices (`span`), the whole passes are composed of their halves, with a collective in between.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from jax_bnar import reference
from jax_bnar._base.config import Activation, Gate
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._kernels import kernel_call
from jax_bnar._sharding.collectives import Span, merge_statistics, sum_packed

Operands = tuple[jax.Array | None, ...]
Results = tuple[jax.Array, ...]


def call(
    operation: kernel_call.Operation,
    *operands: jax.Array | None,
    layout: ChannelLayout,
    implementation: Implementation,
    **statics: Any,
) -> Results:
    """Applies a canonical operation to arrays of this layout."""
    signature = operation.signature
    kinds = signature.operand_kinds(statics)
    named = dict(zip(kinds, operands, strict=True))
    x = named[signature.x]
    assert x is not None
    canonical = layout.to_canonical(named.values(), kinds.values(), x.shape)
    results = operation(*canonical, implementation=implementation, **statics)
    return layout.from_canonical(results, signature.result_kinds(statics), x.shape)


class Halves(NamedTuple):
    """The operations that backward is composed of if it has a collective in the middle.

    Like `call`, each takes operands, `layout`, `implementation` and its static parameters.
    """

    backward_reduce: Callable[..., Results]
    backward_apply: Callable[..., Results]


ON_ONE_DEVICE: Final = Halves(
    functools.partial(call, kernel_call.backward_reduce),
    functools.partial(call, kernel_call.backward_apply),
)


def forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    span: Span,
    layout: ChannelLayout,
    implementation: Implementation,
    epsilon: float,
    activation: Activation,
    save_mask: bool,
) -> Results:
    mean, var = statistics(x, span=span, layout=layout, implementation=implementation)
    y, *mask = normalise(
        x,
        z,
        scale,
        bias,
        mean,
        var,
        span=span,
        layout=layout,
        implementation=implementation,
        epsilon=epsilon,
        activation=activation,
        save_mask=save_mask,
    )
    return (y, mean, var, *mask)


def statistics(
    x: jax.Array, *, span: Span, layout: ChannelLayout, implementation: Implementation
) -> Results:
    mean, var = call(kernel_call.statistics, x, layout=layout, implementation=implementation)
    return merge_statistics(mean, var, span)


def normalise(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    return call(
        kernel_call.normalise, *with_selected(kernel_call.normalise, operands, span), **statics
    )


def backward_reduce(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    own = with_selected(kernel_call.backward_reduce, operands, span)
    sum_e, sum_e_centred, *dz = call(kernel_call.backward_reduce, *own, **statics)
    return (*sum_packed(span, sum_e, sum_e_centred), *dz)


def backward_apply(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    own = with_selected(kernel_call.backward_apply, operands, span)
    return call(kernel_call.backward_apply, *own, **statics)


def backward(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dmean: jax.Array,
    dvar: jax.Array,
    *,
    span: Span,
    layout: ChannelLayout,
    implementation: Implementation,
    epsilon: float,
    gate: Gate,
    has_z: bool,
    halves: Halves = ON_ONE_DEVICE,
) -> Results:
    """(dx, dscale, dbias, *dz) with one all-reduce. With S the sum over devices and a = scale*rstd:

        dx = a*e - S[a*sum(e)]/n - rstd*(x-mean)*S[a*sum(e*xhat)]/n + dmean/n + 2*dvar*(x-mean)/n

    If the devices share a scale, the result of the all-reduce is multiplied by a, and it also gives
    dscale and dbias over all devices. If each device may have a different scale, each multiplies
    its contribution by its own a, and dscale and dbias are those of this device alone.
    """
    options: dict[str, Any] = {
        "layout": layout,
        "implementation": implementation,
        "epsilon": epsilon,
    }
    of_gate = (var, scale, bias) if gate == "x" else (None, None, None)
    sum_e, sum_e_centred, *dz = halves.backward_reduce(
        dy, x, saved, *selected(span, mean, *of_gate), **options, gate=gate, has_z=has_z
    )
    rstd = reference.reciprocal_std(var, epsilon)
    a = reference.scaled_rstd(rstd, scale)
    if span.shares_scale:
        (dbias, sum_e_centred), cotangents = span.sum_backward(
            (sum_e, sum_e_centred), (dmean, dvar)
        )
        dscale = rstd * sum_e_centred
        weighted = (a * dbias, a * dscale)
    else:
        dbias, dscale = sum_e, rstd * sum_e_centred
        weighted, cotangents = span.sum_backward((a * dbias, a * dscale), (dmean, dvar))
    (sum_ae, sum_ae_normalised), (dmean, dvar) = weighted, cotangents
    count = span.parts * layout.group_elements(x.shape)
    coefficients = reference.backward_coefficients(
        sum_ae, sum_ae_normalised, rstd, dmean, dvar, count=count
    )
    # dz is e, so the gate has already been applied.
    gate = "none" if dz else gate
    affine = beside_coefficients(var, scale, bias if gate == "x" else None)
    (dx,) = halves.backward_apply(
        dz[0] if dz else dy,
        x,
        None if gate == "none" else saved,
        *selected(span, mean, var, *affine, *coefficients),
        **options,
        gate=gate,
    )
    return (dx, dscale, dbias, *dz)


def beside_coefficients(
    var: jax.Array, *parameters: jax.Array | None
) -> tuple[jax.Array | None, ...]:
    """The parameters, as results of the fused loop that computes the coefficients.

    The same loop often updates the parameters in place, so the last half of backward cannot read
    them there, and XLA would copy each by a kernel of its own. A variance is never negative, but
    XLA does not know that.
    """
    return tuple(
        None if each is None else jnp.where(var < 0, jnp.zeros_like(each), each)
        for each in parameters
    )


def selected(span: Span, *vectors: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """The values of group vectors for this device's parts."""
    return tuple(None if vector is None else span.select(vector) for vector in vectors)


def with_selected(
    operation: kernel_call.Operation, operands: Operands, span: Span
) -> tuple[jax.Array | None, ...]:
    """The operands, with each vector replaced by its values for this device's parts."""
    return tuple(
        span.select(array) if array is not None and operand.kind == "vector" else array
        for operand, array in zip(operation.signature.operands, operands, strict=True)
    )


ACROSS_DEVICES: Final[dict[str, Callable[..., Results]]] = {
    "forward": forward,
    "backward": backward,
    "statistics": statistics,
    "normalise": normalise,
    "backward_reduce": backward_reduce,
    "backward_apply": backward_apply,
}
