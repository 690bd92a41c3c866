"""Operands of one call made to agree, before the derivative rule sees them.

`jnp` reshards and casts its operands by itself, and so adds up the gradient of an operand that
devices share. A derivative rule must return gradients of the types that its operands have: the
casts stand before it, and their transposes do the adding up.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_bnar._base.jax_compat import reconcile_vma
from jax_bnar._base.layout import ChannelLayout

_Array = TypeVar("_Array", jax.Array, jax.Array | None)


def align_operands(
    layout: ChannelLayout, x: jax.Array, z: jax.Array | None, *vectors: jax.Array | None
) -> list[Any]:
    """x, z and vectors of shape (1, C), varying over the same manual mesh axes (`shard_map`)

    and sharded alike over Explicit ones: as x, or as z where x is not sharded.
    """
    if sharded := _explicit_shardings(x, z):
        mesh, spec = sharded[0].mesh, sharded[0].spec
        channels = PartitionSpec(None, spec[layout.axis])
        x, z = _resharded(x, mesh, spec), _resharded(z, mesh, spec)
        vectors = tuple(_resharded(a, mesh, channels) for a in vectors)
    return reconcile_vma([x, z, *vectors])


def with_automatic_axes(
    function: Callable[..., Any], out_specs: tuple[PartitionSpec, ...], *arrays: jax.Array | None
) -> Any:
    """function(*arrays), in which XLA shards what the types of Explicit meshes would have to name.

    The mathematics in `jnp` merges axes, which those types do not allow where one is sharded.
    """
    sharded = _explicit_shardings(*arrays)
    if not sharded:
        return function(*arrays)
    shardings = tuple(NamedSharding(sharded[0].mesh, spec) for spec in out_specs)
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*arrays)


def _explicit_shardings(*arrays: jax.Array | None) -> list[Any]:
    types = [jax.typeof(array).sharding for array in arrays if array is not None]
    return [sharding for sharding in types if any(entry is not None for entry in sharding.spec)]


def _resharded(array: _Array, mesh: Any, spec: PartitionSpec) -> _Array:
    if array is None or jax.typeof(array).sharding.spec == spec:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))
