"""Sums of arrays: of one, and of two as one operation, which reads once what both come from.

Otherwise, XLA for GPUs would store an array to take two sums from it. XLA for CPUs walks through a
reduction of two arrays column by column, which is slow where the last axis is kept, so there they
are two. The operation is a primitive, because `jax.lax.reduce` of two arrays has no transpose, and
the derivatives of that are not made of sums.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jax_bnar._base import jax_compat


def paired_sums(
    first: jax.Array, second: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The sums over `axes`, in ascending order, of two arrays of one shape and dtype."""
    sum_of_first, sum_of_second = paired_sums_p.bind(
        *jax_compat.reconcile_vma([first, second]), axes=axes
    )
    return sum_of_first, sum_of_second


def total(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum of one array over `axes`, in ascending order."""
    sizes = _Sizes(array.shape, axes)
    return jax.lax.squeeze(array, sizes.ones).sum(axis=sizes.summed).reshape(sizes.kept)


class _Sizes:
    """What a sum over `axes` is of an array without its axes of length 1.

    These keep XLA from seeing that a sum is one over rows or over columns: XLA for GPUs transposes
    the array first, and XLA for CPUs takes many times as long.

    Attributes:
        ones: the axes of length 1.
        summed: which of the others are summed, counted without those.
        kept: the shape of the result.
        keeps_last: whether the last of the others is kept.
    """

    def __init__(self, shape: tuple[Any, ...], axes: tuple[int, ...]) -> None:
        # A symbolic size (jax.export) is not an int.
        self.ones = tuple(i for i, size in enumerate(shape) if isinstance(size, int) and size == 1)
        long = [i for i in range(len(shape)) if i not in self.ones]
        self.summed = tuple(long.index(axis) for axis in axes if axis in long)
        self.kept = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        self.keeps_last = bool(long) and long[-1] not in axes


def _compute(first: jax.Array, second: jax.Array, *, axes: tuple[int, ...]) -> Any:
    def add(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        return left[0] + right[0], left[1] + right[1]

    zero = jnp.zeros((), first.dtype)
    sizes = _Sizes(first.shape, axes)
    arrays = jax.lax.squeeze(first, sizes.ones), jax.lax.squeeze(second, sizes.ones)
    sums = jax.lax.reduce(arrays, (zero, zero), add, sizes.summed)
    return [each.reshape(sizes.kept) for each in sums]


def _compute_on_cpus(first: jax.Array, second: jax.Array, *, axes: tuple[int, ...]) -> Any:
    if _Sizes(first.shape, axes).keeps_last:
        return total(first, axes), total(second, axes)
    return _compute(first, second, axes=axes)


def _abstract(first: Any, second: Any, *, axes: tuple[int, ...]) -> list[jax.core.ShapedArray]:
    shape = tuple(size for axis, size in enumerate(first.shape) if axis not in axes)
    return jax_compat.sharded_avals(
        first, [shape] * 2, [first.dtype, second.dtype], [PartitionSpec()] * 2
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, axes: tuple[int, ...]) -> Any:
    results = paired_sums_p.bind(*primals, axes=axes)
    moving = [not isinstance(tangent, jax_compat.Zero) for tangent in tangents]
    if all(moving):
        return results, paired_sums_p.bind(*tangents, axes=axes)
    return results, [
        tangent.sum(axis=axes) if moves else jax_compat.Zero(jax.typeof(result).to_tangent_aval())
        for result, tangent, moves in zip(results, tangents, moving, strict=True)
    ]


def _transpose(cotangents: Sequence[Any], *arrays: Any, axes: tuple[int, ...]) -> list[Any]:
    def of_array(cotangent: Any, array: Any) -> Any:
        if not jax_compat.is_undefined_primal(array):
            return None
        if isinstance(cotangent, jax_compat.Zero):
            return jax_compat.Zero(array.aval)
        return jnp.broadcast_to(jnp.expand_dims(cotangent, axes), array.aval.shape)

    return [of_array(*pair) for pair in zip(cotangents, arrays, strict=True)]


def _batch(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, axes: tuple[int, ...]
) -> tuple[Sequence[jax.Array], list[int | None]]:
    inner = tuple(axis + 1 for axis in axes)  # The mapped axis is moved to the front.
    moved = [
        array if dim is None else jnp.moveaxis(array, dim, 0)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    if all(dim is not None for dim in dims):
        return paired_sums_p.bind(*moved, axes=inner), [0, 0]
    # One operation would make both results vary along the mapped axis.
    sums = [
        array.sum(axis=axes if dim is None else inner)
        for array, dim in zip(moved, dims, strict=True)
    ]
    return sums, [None if dim is None else 0 for dim in dims]


paired_sums_p = Primitive("jax_bnar_paired_sums")
paired_sums_p.multiple_results = True
paired_sums_p.def_impl(
    lambda *arrays, axes: jax_compat.apply_primitive(paired_sums_p, *arrays, axes=axes)
)
paired_sums_p.def_abstract_eval(_abstract)
jax_compat.register_lowering(paired_sums_p, jax_compat.lower_fun(_compute))
jax_compat.register_lowering(paired_sums_p, jax_compat.lower_fun(_compute_on_cpus), platform="cpu")
jax_compat.primitive_jvps[paired_sums_p] = _jvp
jax_compat.primitive_transposes[paired_sums_p] = _transpose
jax_compat.primitive_batchers[paired_sums_p] = _batch
