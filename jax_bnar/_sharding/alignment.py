"""Makes the operands of a call agree in sharding before they reach the derivative rule.

`jnp` functions reshard and cast their operands themselves, and the transposes of these casts sum
the gradient of an operand that devices share. A derivative rule, however, must return gradients of
the same types as its operands. So the casts are applied before the rule, and their transposes do
the summing.
"""

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


def _explicit_shardings(arrays: Any) -> list[Any]:
    types = [jax.typeof(array).sharding for array in jax.tree.leaves(arrays)]
    return [sharding for sharding in types if any(entry is not None for entry in sharding.spec)]


def _resharded(array: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    if jax.typeof(array).sharding.spec == spec:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))
