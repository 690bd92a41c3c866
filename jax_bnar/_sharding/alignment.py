"""Makes the operands of a call agree in sharding before they reach the derivative rule.

`jnp` functions reshard and cast their operands themselves, and the transposes of these casts sum
the gradient of an operand that devices share. A derivative rule, however, must return gradients of
the same types as its operands. So the casts are applied before the rule, and their transposes do
the summing.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_bnar._base.jax_compat import reconcile_vma
from jax_bnar._base.layout import ChannelLayout

_Tensors = TypeVar("_Tensors")
_Vectors = TypeVar("_Vectors")


def align_operands(
    layout: ChannelLayout, tensors: _Tensors, vectors: _Vectors
) -> tuple[_Tensors, _Vectors]:
    """Makes tensors of the shape of x, and vectors of shape (1, C), agree about mesh axes.

    They then vary over the same manual mesh axes (`shard_map`), and are sharded alike over Explicit
    axes: like the first of the tensors that is sharded, or not at all if none is.
    """
    sharded = _explicit_shardings(tensors)
    channels = PartitionSpec(None, None)
    if sharded:
        mesh, spec = sharded[0].mesh, sharded[0].spec
        channels = PartitionSpec(None, spec[layout.axis])
        tensors = jax.tree.map(lambda array: _resharded(array, mesh, spec), tensors)
    if sharded := sharded or _explicit_shardings(vectors):
        mesh = sharded[0].mesh
        vectors = jax.tree.map(lambda array: _resharded(array, mesh, channels), vectors)
    leaves, tree = jax.tree.flatten((tensors, vectors))
    return jax.tree.unflatten(tree, reconcile_vma(leaves))


def with_automatic_axes(
    function: Callable[..., Any], out_specs: tuple[PartitionSpec, ...], *arrays: Any
) -> Any:
    """function(*arrays), with the mesh axes automatic inside, so that XLA chooses the shardings.

    The `jnp` code merges array axes, which the types of Explicit meshes forbid if one is sharded.
    """
    sharded = _explicit_shardings(arrays)
    if not sharded:
        return function(*arrays)
    shardings = tuple(NamedSharding(sharded[0].mesh, spec) for spec in out_specs)
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*arrays)


def merge_axes(array: jax.Array, start: int, stop: int) -> jax.Array:
    """The array with the axes [start, stop) as one, which is sharded like the first of them.

    JAX merges no axes of which a later one is sharded over an Explicit mesh axis.
    """
    shape, spec = array.shape, jax.typeof(array).sharding.spec
    merged = (*shape[:start], math.prod(shape[start:stop]), *shape[stop:])
    if all(entry is None for entry in spec[start + 1 : stop]):
        return array.reshape(merged)
    kept = PartitionSpec(*spec[: start + 1], *spec[stop:])
    return with_automatic_axes(lambda array: (array.reshape(merged),), (kept,), array)[0]


def split_axis(
    array: jax.Array, axis: int, sizes: tuple[int, ...], mesh: Any, entries: tuple[Any, ...]
) -> jax.Array:
    """The inverse: the axis as several of these sizes, with these entries of a PartitionSpec."""
    shape, spec = array.shape, jax.typeof(array).sharding.spec
    split = (*shape[:axis], *sizes, *shape[axis + 1 :])
    if all(entry is None for entry in entries[1:]):
        return array.reshape(split)
    given = PartitionSpec(*spec[:axis], *entries, *spec[axis + 1 :])
    (reshaped,) = with_automatic_axes(lambda array: (array.reshape(split),), (given,), array)
    return _resharded(reshaped, mesh, given)  # Without a sharded axis, nothing was automatic.


def _explicit_shardings(arrays: Any) -> list[Any]:
    types = [jax.typeof(array).sharding for array in jax.tree.leaves(arrays)]
    return [sharding for sharding in types if any(entry is not None for entry in sharding.spec)]


def _resharded(array: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    if jax.typeof(array).sharding.spec == spec:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))
