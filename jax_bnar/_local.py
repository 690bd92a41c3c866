"""The six operations on the arrays of one device, in the user's layout.

Where every statistics group is whole on the device they are one kernel call each. Where groups span
devices (`span`), the whole passes are made of their halves, with a collective in between.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from jax_bnar import primitive, reference
from jax_bnar._collectives import Span, merge_statistics, sum_packed
from jax_bnar._config import Activation, Gate
from jax_bnar._implementation import Implementation
from jax_bnar._layout import Kind, Layout, kind_of

Operands = tuple[jax.Array | None, ...]
Results = tuple[jax.Array, ...]


def result_kinds(name: str, statics: dict[str, Any]) -> list[Kind]:
    """The kinds of an operation's results."""
    mask: list[Kind] = ["mask"] if statics.get("save_mask") else []
    dz: list[Kind] = ["tensor"] if statics.get("has_residual") else []
    kinds: dict[str, list[Kind]] = {
        "forward": ["tensor", "vector", "vector", *mask],
        "backward": ["tensor", "vector", "vector", *dz],
        "statistics": ["vector", "vector"],
        "normalise": ["tensor", *mask],
        "backward_reduce": ["vector", "vector", *dz],
        "backward_apply": ["tensor"],
    }
    return kinds[name]


def call(
    operation: primitive.Operation,
    *operands: jax.Array | None,
    layout: Layout,
    implementation: Implementation,
    **statics: Any,
) -> Results:
    """One of the canonical operations, on arrays of this layout."""
    named = dict(zip(operation.operands, operands, strict=True))
    x = named["x"]
    assert x is not None
    gate = statics.get("gate")
    canonical = (
        None if array is None else layout.to_canonical(array, kind_of(name, gate), x.shape)
        for name, array in named.items()
    )
    results = operation(*canonical, implementation=implementation, **statics)
    return tuple(
        layout.from_canonical(result, kind, x.shape)
        for result, kind in zip(results, result_kinds(operation.name, statics), strict=True)
    )


def element_count(layout: Layout, shape: tuple[int, ...]) -> int:
    """Elements of one statistics group of an array of this shape."""
    _, rows, _, inner = layout.canonical(shape)
    return rows * inner


def forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    span: Span,
    layout: Layout,
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
    x: jax.Array, *, span: Span, layout: Layout, implementation: Implementation
) -> Results:
    mean, var = call(primitive.statistics, x, layout=layout, implementation=implementation)
    return merge_statistics(mean, var, span)


def normalise(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    return call(primitive.normalise, *_picked(primitive.normalise, operands, span), **statics)


def backward_reduce(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    picked = _picked(primitive.backward_reduce, operands, span)
    sum_e, sum_e_centred, *dz = call(primitive.backward_reduce, *picked, **statics)
    return (*sum_packed(span, sum_e, sum_e_centred), *dz)


def backward_apply(*operands: jax.Array | None, span: Span, **statics: Any) -> Results:
    picked = _picked(primitive.backward_apply, operands, span)
    return call(primitive.backward_apply, *picked, **statics)


def backward(
    dy: jax.Array,
    x: jax.Array,
    evidence: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dmean: jax.Array,
    dvar: jax.Array,
    *,
    span: Span,
    layout: Layout,
    implementation: Implementation,
    epsilon: float,
    gate: Gate,
    has_residual: bool,
) -> Results:
    multiplier = gate_multiplier(
        gate,
        scale,
        var,
        normalise=functools.partial(call, primitive.normalise),
        implementation=implementation,
        epsilon=epsilon,
    )
    gate_bias = bias if gate == "x" else None
    options = {"span": span, "layout": layout, "implementation": implementation}
    sum_e, sum_e_centred, *dz = backward_reduce(
        dy,
        x,
        evidence,
        mean,
        multiplier,
        gate_bias,
        gate=gate,
        has_residual=has_residual,
        **options,
    )
    dx = input_gradient(
        dz[0] if dz else dy,
        x,
        evidence,
        mean,
        var,
        scale,
        gate_bias,
        multiplier,
        sums=(sum_e, sum_e_centred),
        cotangents=(dmean, dvar),
        count=span.parts * element_count(layout, x.shape),
        epsilon=epsilon,
        gate="none" if dz else gate,
        apply=functools.partial(backward_apply, **options),
    )
    rstd = reference.reciprocal_std(var, epsilon)
    return (dx, rstd * sum_e_centred, sum_e, *dz)


def gate_multiplier(
    gate: Gate,
    scale: jax.Array | None,
    var: jax.Array,
    *,
    normalise: Callable[..., Results],
    implementation: Implementation,
    epsilon: float,
) -> jax.Array | None:
    """scale*rstd for gate "x", bit for bit as forward had it; None for the other gates.

    Gate "x" asks whether (x-mean)*a + bias rounds above 0, as it did in forward; with another
    rounding of `a` the answer may differ. The kernels compute `a` in double and round once, so the
    kernel itself is asked: it normalises a 1, with mean 0 and no bias. A call on C elements, for
    otherwise y would have to be kept.
    """
    if gate != "x":
        return None
    # Each value of var is a statistics group of its own, with one element.
    shape = (*var.shape[:-1], 1, var.shape[-1])
    vector, channels = (*var.shape[:-1], 1, var.shape[-1]), Layout(axis=1, leading=var.ndim - 1)
    (a,) = normalise(
        jnp.ones(shape, var.dtype),
        None,
        None if scale is None else jnp.broadcast_to(scale, var.shape).reshape(vector),
        None,
        jnp.zeros(vector, var.dtype),
        var.reshape(vector),
        layout=channels,
        implementation=implementation,
        epsilon=epsilon,
        activation="none",
        save_mask=False,
    )
    return a.reshape(var.shape)


def input_gradient(
    e: jax.Array,
    x: jax.Array,
    evidence: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    gate_bias: jax.Array | None,
    multiplier: jax.Array | None,
    *,
    sums: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
    count: jax.Array | int,
    epsilon: float,
    gate: Gate,
    apply: Callable[..., Results],
) -> jax.Array:
    """dx from sums over whole groups; `e` is dz with gate "none", or dy with its gate."""
    a, b, k = reference.backward_coefficients(
        *sums, var, scale, *cotangents, count=count, epsilon=epsilon
    )
    (dx,) = apply(
        e,
        x,
        None if gate == "none" else evidence,
        mean,
        a if multiplier is None else multiplier,
        b,
        k,
        gate_bias if gate == "x" else None,
        gate=gate,
    )
    return dx


def _picked(
    operation: primitive.Operation, operands: Operands, span: Span
) -> tuple[jax.Array | None, ...]:
    """The operands with the vectors of this device's parts."""
    return tuple(
        span.pick(array) if array is not None and kind_of(name) == "vector" else array
        for name, array in zip(operation.operands, operands, strict=True)
    )


SPANNING: Final[dict[str, Callable[..., Results]]] = {
    "forward": forward,
    "backward": backward,
    "statistics": statistics,
    "normalise": normalise,
    "backward_reduce": backward_reduce,
    "backward_apply": backward_apply,
}
