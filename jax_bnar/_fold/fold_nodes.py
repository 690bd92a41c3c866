"""The two nodes of a fold, which take the place of a weighted sum and its BatchNorm.

One computes the new weight and the offset from the old weight and the vectors of the chain, and the
other is the convolution or product with the new weight, plus the offset.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fold.chain import Chain, Operation, affine
from jax_bnar._fold.producers import WeightedSum
from jax_bnar._fuse.dtypes import holds, is_real
from jax_bnar._fuse.nodes import Node, Operand, Value


def channel_axis(found: WeightedSum, chain: Chain) -> int | None:
    """The axis of the sum along which factor and offset run; None if that is not known."""
    if chain.axis is None and len(found.channels) == 1:
        return next(iter(found.channels))
    return chain.axis


def fold_nodes(
    found: WeightedSum, chain: Chain, axis: int, refuse: Callable[[str], object]
) -> tuple[Node, Node]:
    """The node that computes weight and offset, and the one that computes the end of the chain.

    The former calls `refuse` with the reason if the weight cannot have the factor in it. `axis` is
    `channel_axis`.
    """
    weight = found.node.operands[found.weight]
    channels = found.result.shape[axis]
    dtype = accumulation_dtype(found.result.dtype)
    new_weight = Value(weight.aval)
    offset = Value(ShapedArray((channels,), dtype))
    steps = [(step.name, step.is_first, step.axis, step.part) for step in chain.steps]
    once = Node(
        "fold",
        {"steps": steps, "axis": axis, "channels": found.channels},
        [_before_rounding(weight), *chain.vectors],
        [new_weight, offset],
        found.node.equation,
        found.node.name_stack,
        functools.partial(_folded, chain, weight, found.channels[axis], channels, dtype, refuse),
    )
    producer = chain.end.producer
    assert producer is not None
    each = Node(
        "folded",
        {},
        [found.array, new_weight, offset],
        [chain.end],
        producer.equation,
        found.node.name_stack,
        functools.partial(_applied, found, chain, axis),
    )
    new_weight.producer = offset.producer = once
    return once, each


def _before_rounding(weight: Operand) -> Operand:
    """The weight in the widest dtype that the program has it in, so that it is rounded once.

    A weight that is rounded and widened again, or rounded to 8 bits, is rounded on purpose.
    """
    while isinstance(weight, Value) and (node := weight.producer) is not None:
        inner = node.inputs[0] if node.inputs else weight
        if node.name != "convert_element_type" or not is_real(inner.dtype):
            break
        if not is_real(weight.dtype) or not holds(inner.dtype, weight.dtype):
            break
        weight = inner
    return weight


def _folded(
    chain: Chain,
    weight: Operand,
    axis: int,
    channels: int,
    dtype: Any,
    refuse: Callable[[str], object],
    given: Any,
    *vectors: Any,
) -> list[jax.Array]:
    rounded, offset, is_finite, is_held = _computed(
        chain.operations, axis, channels, weight.dtype, dtype, given, *vectors
    )
    if isinstance(is_finite, jax.core.Tracer):
        if weight.dtype == jnp.float16:
            refuse("whether float16 holds the folded weight is not known while it is traced")
    elif not is_finite:
        refuse("the factor or the folded weight would be infinite or NaN")
    elif not is_held:
        refuse(f"the folded weight would leave the range of {weight.dtype}")
    return [rounded, offset]


# One compilation for each shape of a weight, where its operations would take ten.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _computed(
    operations: tuple[Operation, ...],
    axis: int,
    channels: int,
    weight_dtype: Any,
    dtype: Any,
    given: Any,
    *vectors: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The new weight, the offset, whether all is finite, and whether the dtype holds the weight."""
    factor, offset = affine(operations, vectors, dtype)
    shape = [1] * np.ndim(given)
    shape[axis] = channels if factor.ndim else 1
    folded = jnp.asarray(given, dtype) * factor.reshape(shape)
    rounded = folded.astype(weight_dtype)
    # In the kernel, an infinite factor would meet the zeros of x one by one: 0 * inf is NaN. The
    # product of a weight and a factor may overflow where what the network computes does not.
    is_finite = jnp.isfinite(factor).all() & jnp.isfinite(folded).all()
    offsets = jnp.broadcast_to(offset, (channels,))
    return rounded, offsets, is_finite, _is_held(folded, rounded)


def _is_held(folded: jax.Array, rounded: jax.Array) -> jax.Array:
    """Whether a folded weight is within the range of its dtype."""
    if rounded.dtype != jnp.float16:
        return jnp.asarray(True)  # The other dtypes have the range of the accumulation dtype.
    error = jnp.linalg.norm((folded - rounded.astype(folded.dtype)).ravel())
    # Without overflow and underflow, it is below 2^-11 of the norm.
    return error <= 2**-9 * jnp.linalg.norm(folded.ravel())


def _applied(
    found: WeightedSum, chain: Chain, axis: int, array: Any, weight: Any, offset: Any
) -> list[jax.Array]:
    operands = (array, weight) if found.weight == 1 else (weight, array)
    (result,) = found.node.run(*operands)
    shape = [1] * result.ndim
    shape[axis] = result.shape[axis]
    return chain.finish(result.astype(offset.dtype) + offset.reshape(shape))
