"""The operations if statistics groups span devices, on the arrays of one device.

The whole passes are composed of their halves, with a collective in between (`span`). Arguments and
results are those of the operations of `jax_bnar._kernels.kernel_call`, in the user's layout.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_bnar import reference
from jax_bnar._base.element_count import element_count
from jax_bnar._base.gates import Gate, recomputes
from jax_bnar._base.implementation import Computation
from jax_bnar._base.inputs import Affine, Statistics, read_by_gate
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import PerOperation
from jax_bnar._kernels.kernel_call import CANONICAL, Operation
from jax_bnar._sharding.collectives import Span, merge_statistics, sum_packed

Arrays = tuple[jax.Array, ...]
_Vectors = TypeVar("_Vectors")


class Halves(NamedTuple):
    """The operations that backward is composed of if it has a collective in the middle.

    Each takes its arguments, `layout`, `implementation` and its static parameters.
    """

    backward_reduce: Callable[..., Any]
    backward_apply: Callable[..., Any]


def local_halves(inputs: int) -> Halves:
    """The halves on one device's part of the arrays."""
    operations = CANONICAL[inputs]
    return Halves(operations.backward_reduce.on_one_device, operations.backward_apply.on_one_device)


def statistics_of_groups(
    x: Arrays, span: Span, statistics: Callable[..., Any], **options: Any
) -> tuple[Statistics, ...]:
    """Those of whole groups, by one all-reduce; `statistics` gives those of parts."""
    return merge_statistics([statistics(own, **options) for own in x], span)


def forward(
    x: Arrays,
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    *,
    span: Span,
    layout: ChannelLayout,
    implementation: Computation,
    **statics: Any,
) -> tuple[jax.Array, tuple[Statistics, ...], jax.Array | None]:
    options: dict[str, Any] = {"layout": layout, "implementation": implementation}
    local = CANONICAL[len(x)].statistics.on_one_device
    of_groups = statistics_of_groups(x, span, local, **options)
    y, mask = normalise(x, z, affine, of_groups, span=span, **options, **statics)
    return y, of_groups, mask


def statistics(x: jax.Array, *, span: Span, **options: Any) -> Statistics:
    (whole,) = statistics_of_groups((x,), span, CANONICAL[1].statistics.on_one_device, **options)
    return whole


def normalise(x: Arrays, *arguments: Any, span: Span, **statics: Any) -> Any:
    operation = CANONICAL[len(x)].normalise
    return operation.on_one_device(*_with_selected(operation, (x, *arguments), span), **statics)


def backward_reduce(
    dy: jax.Array, x: Arrays, *arguments: Any, span: Span, **statics: Any
) -> tuple[jax.Array, Arrays, jax.Array | None]:
    operation = CANONICAL[len(x)].backward_reduce
    operands = _with_selected(operation, (dy, x, *arguments), span)
    sum_e, sum_e_centred, dz = operation.on_one_device(*operands, **statics)
    sum_e, *centred = sum_packed(span, sum_e, *sum_e_centred)
    return sum_e, tuple(centred), dz


def backward_apply(dy: jax.Array, x: Arrays, *arguments: Any, span: Span, **statics: Any) -> Arrays:
    operation = CANONICAL[len(x)].backward_apply
    return operation.on_one_device(*_with_selected(operation, (dy, x, *arguments), span), **statics)


def backward(
    dy: jax.Array,
    x: Arrays,
    saved: jax.Array | None,
    statistics: tuple[Statistics, ...],
    affine: tuple[Affine, ...],
    cotangents: tuple[Statistics, ...],
    *,
    span: Span,
    layout: ChannelLayout,
    implementation: Computation,
    epsilon: float,
    gate: Gate,
    halves: Halves | None = None,
    **statics: Any,
) -> tuple[Arrays, Arrays, jax.Array, jax.Array | None]:
    """(dx, dscale, dbias, dz) with one all-reduce. With S the sum over devices and a = scale*rstd:

        dx = a*e - S[a*sum(e)]/n - rstd*(x-mean)*S[a*sum(e*xhat)]/n + dmean/n + 2*dvar*(x-mean)/n

    for each input. If the devices share a scale, the result of the all-reduce is multiplied by a,
    and it also gives dscale and dbias over all devices. If each device may have a different scale,
    each multiplies its contribution by its own a, and dscale and dbias are those of this device
    alone.
    """
    reduce, apply = halves or local_halves(len(x))
    options: dict[str, Any] = {
        "layout": layout,
        "implementation": implementation,
        "epsilon": epsilon,
    }
    of_gate = read_by_gate(gate, statistics, affine)
    sum_e, centred, dz = reduce(
        dy, x, saved, *_selected(span, of_gate), **options, gate=gate, **statics
    )
    rstd, a = reference.roots_and_factors(statistics, affine, epsilon)

    def times_rstd(centred: Sequence[jax.Array]) -> Arrays:
        return tuple(rstd_i * sum_i for rstd_i, sum_i in zip(rstd, centred, strict=True))

    def weighted(dbias: jax.Array, dscale: Sequence[jax.Array]) -> Arrays:
        """a*dbias and a*dscale of the first input, then those of the second."""
        return tuple(
            a_i * total
            for a_i, dscale_i in zip(a, dscale, strict=True)
            for total in (dbias, dscale_i)
        )

    dstatistics = tuple(jax.tree.leaves(cotangents))
    if span.shares_scale:
        (dbias, *centred), dstatistics = span.sum_backward((sum_e, *centred), dstatistics)
        dscale = times_rstd(centred)
        sums = weighted(dbias, dscale)
    else:
        dbias, dscale = sum_e, times_rstd(centred)
        sums, dstatistics = span.sum_backward(weighted(dbias, dscale), dstatistics)
    count = element_count(span.parts, *layout.group_sizes(x[0].shape), dtype=rstd[0].dtype)
    coefficients = tuple(
        reference.backward_coefficients(*of_input, count=count)
        for of_input in zip(
            sums[::2], sums[1::2], rstd, dstatistics[::2], dstatistics[1::2], strict=True
        )
    )
    if dz is not None:  # dz is e, so the gate has already been applied.
        dy, saved, gate = dz, None, "none"
    beside = tuple(
        _beside_coefficients(
            statistics_i.var, affine_i if recomputes(gate) else affine_i._replace(bias=None)
        )
        for statistics_i, affine_i in zip(statistics, affine, strict=True)
    )
    dx = apply(
        *(dy, x, saved),
        *_selected(span, (statistics, beside, coefficients)),
        **options,
        gate=gate,
        **{name: value for name, value in statics.items() if name != "has_z"},
    )
    return dx, dscale, dbias, dz


def _beside_coefficients(var: jax.Array, parameters: Affine) -> Affine:
    """The parameters, as results of the fused loop that computes the coefficients.

    The same loop often updates the parameters in place, so the last half of backward cannot read
    them there, and XLA would copy each by a kernel of its own. A variance is never negative, so
    the `where` always returns the parameter. XLA does not know that, and writes a copy in that
    loop.
    """
    return jax.tree.map(lambda each: jnp.where(var < 0, jnp.zeros_like(each), each), parameters)


def _selected(span: Span, vectors: _Vectors) -> _Vectors:
    """The values of group vectors for this device's parts."""
    return jax.tree.map(span.select, vectors)


def _with_selected(operation: Operation, arguments: tuple[Any, ...], span: Span) -> tuple[Any, ...]:
    """The arguments, with each vector replaced by its values for this device's parts."""
    signature = operation.signature
    operands = zip(signature.operands, signature.flat(arguments), strict=True)
    return signature.structured(
        [
            span.select(array) if array is not None and operand.kind == "vector" else array
            for operand, array in operands
        ]
    )


_OF_HALVES: Final[PerOperation[Callable[..., Any]]] = PerOperation(
    forward=forward,
    backward=backward,
    statistics=statistics,
    normalise=normalise,
    backward_reduce=backward_reduce,
    backward_apply=backward_apply,
)
# By the name of the operation, which says for how many inputs it is.
ACROSS_DEVICES: Final = {
    operation.name: of_halves
    for operations in CANONICAL.values()
    for operation, of_halves in zip(operations, _OF_HALVES, strict=True)
}
