"""Layers whose statistics are those of named axes, as people write them, and what maps them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuse_tools import array, error, in_float64
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_bnar

ROWS, CHANNELS, DEVICES = 32, 6, 4
ARGUMENTS = (
    array((ROWS, CHANNELS)),
    array((ROWS, CHANNELS), 1),
    array((CHANNELS,), 2),
    array((CHANNELS,), 3),
)
GROUPS = [[0, 2], [3, 1]]
OTHER_GROUPS = [[0, 1], [2, 3]]

Layer = Callable[..., jax.Array]


def moments(x: Any) -> tuple[jax.Array, jax.Array]:
    return x.mean(0), jnp.square(x).mean(0)


def normalised(x: Any, z: Any, scale: Any, bias: Any, mean: Any, squares: Any) -> jax.Array:
    mean, squares = mean.reshape(1, -1), squares.reshape(1, -1)
    y = (x - mean) * lax.rsqrt(squares - mean * mean + 1e-3) * scale[None] + bias[None]
    return jax.nn.relu(y + z)


def pmean(array: Any, groups: Any) -> jax.Array:
    return lax.pmean(array, "data", axis_index_groups=groups)


def psum(array: Any, groups: Any) -> jax.Array:
    return lax.psum(array, "data", axis_index_groups=groups)


def size_of(groups: Any) -> int:
    return DEVICES if groups is None else len(groups[0])


def iterated(x: Any, groups: Any) -> Any:
    mean, squares = pmean(jnp.stack(moments(x)), groups)
    return mean, squares


def indexed(x: Any, groups: Any) -> Any:
    both = pmean(jnp.stack(moments(x)), groups)
    return both[0], both[-1]


def indexed_along_the_last_axis(x: Any, groups: Any) -> Any:
    both = pmean(jnp.stack(moments(x), -1), groups)
    return both[..., 0], both[..., 1]


def split(x: Any, groups: Any) -> Any:
    return jnp.split(pmean(jnp.stack(moments(x)), groups), 2)


def unstacked(x: Any, groups: Any) -> Any:
    return jnp.unstack(pmean(jnp.stack(moments(x), 1), groups), axis=1)


def stacked_with_kept_axes(x: Any, groups: Any) -> Any:
    sums = x.sum(0, keepdims=True), (x * x).sum(0, keepdims=True)
    return psum(jnp.stack(sums), groups) / (len(x) * size_of(groups))


def an_array_of_both(x: Any, groups: Any) -> Any:
    return pmean(jnp.array(moments(x)), groups)


def concatenated_and_split(x: Any, groups: Any) -> Any:
    return jnp.split(pmean(jnp.concatenate(moments(x)), groups), 2)


def concatenated_and_sliced(x: Any, groups: Any) -> Any:
    both = pmean(jnp.hstack(moments(x)), groups)
    return both[:CHANNELS], both[CHANNELS:]


def concatenated_and_reshaped(x: Any, groups: Any) -> Any:
    return pmean(jnp.concatenate(moments(x)), groups).reshape(2, -1)


def sums_by_the_size(x: Any, groups: Any) -> Any:
    mean, squares = psum(jnp.stack(moments(x)), groups) / psum(1, groups)
    return mean, squares


def sums_by_a_count_that_is_summed(x: Any, groups: Any) -> Any:
    count = psum(jnp.asarray(len(x), x.dtype), groups)
    total, squares = psum(jnp.stack([x.sum(0), (x * x).sum(0)]), groups)
    return total / count, squares / count


def sums_with_the_count_in_the_stack(x: Any, groups: Any) -> Any:
    """As PyTorch's SyncBatchNorm does: devices say how many examples they have."""
    count = jnp.full((CHANNELS,), len(x), x.dtype)
    total, squares, count = psum(jnp.stack([x.sum(0), (x * x).sum(0), count]), groups)
    return total / count, squares / count


def a_tuple_with_a_count(x: Any, groups: Any) -> Any:
    one = jnp.ones((), x.dtype)
    mean, squares, count = psum((*moments(x), one), groups)
    return mean / count, squares / count


def the_arrays_stacked(x: Any, groups: Any) -> Any:
    mean, squares = pmean(jnp.stack([x, x * x]).mean(1), groups)
    return mean, squares


def centred_by_the_global_mean(x: Any, groups: Any) -> Any:
    mean = pmean(x.mean(0), groups)
    return mean, pmean(jnp.square(x - mean[None]).mean(0), groups) + mean * mean


FORMS = [
    iterated,
    indexed,
    indexed_along_the_last_axis,
    split,
    unstacked,
    stacked_with_kept_axes,
    an_array_of_both,
    concatenated_and_split,
    concatenated_and_sliced,
    concatenated_and_reshaped,
    sums_by_the_size,
    sums_by_a_count_that_is_summed,
    sums_with_the_count_in_the_stack,
    a_tuple_with_a_count,
    the_arrays_stacked,
    centred_by_the_global_mean,
]


def layer(statistics: Callable[..., Any], groups: Any = None) -> Layer:
    return lambda x, *rest: normalised(x, *rest, *statistics(x, groups))


def mesh_of(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def in_shard_map(body: Layer, *, check_vma: bool, mesh: Mesh | None = None) -> Layer:
    mesh = mesh or mesh_of(data=DEVICES)
    rows = P(tuple(mesh.axis_names))
    return jax.shard_map(
        body, mesh=mesh, in_specs=(rows, rows, P(), P()), out_specs=rows, check_vma=check_vma
    )


def mapped_by(map_of: Callable[..., Any]) -> Callable[[Layer], Layer]:
    """A layer over arrays that `map_of`, a vmap or a pmap, splits into parts."""

    def mapped(body: Layer) -> Layer:
        def whole(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
            parts = (a.reshape(DEVICES, -1, CHANNELS) for a in (x, z))
            y = map_of(body, in_axes=(0, 0, None, None), axis_name="data")(*parts, scale, bias)
            return y.reshape(x.shape)

        return whole

    return mapped


WITHOUT_CHECKS = "shard_map, check_vma=False"
MAPPINGS: dict[str, Callable[[Layer], Layer]] = {
    WITHOUT_CHECKS: lambda body: in_shard_map(body, check_vma=False),
    "shard_map, check_vma=True": lambda body: in_shard_map(body, check_vma=True),
    "vmap": mapped_by(jax.vmap),
    "pmap": mapped_by(jax.pmap),
}
# JAX takes groups in these only.
MAPPINGS_WITH_GROUPS = (WITHOUT_CHECKS, "pmap")


def reference(groups: Any = None) -> Layer:
    """BatchNorm over the rows of each group of devices, without named axes."""

    def whole(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        results: list[Any] = [None] * DEVICES
        parts = [jnp.split(a, DEVICES) for a in (x, z)]
        for group in groups or [list(range(DEVICES))]:
            xs, zs = (jnp.concatenate([part[i] for i in group]) for part in parts)
            y = jax.nn.relu(
                (xs - xs.mean(0)[None]) * lax.rsqrt(xs.var(0) + 1e-3)[None] * scale[None]
                + bias[None]
                + zs
            )
            for index, rows in zip(group, jnp.split(y, len(group)), strict=True):
                results[index] = rows
        return jnp.concatenate(results)

    return whole


def value_and_gradients(function: Layer) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        y = function(*args)
        weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
        return jnp.sum(y * weights), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def assert_equal(program: Layer, expected: Layer, *args: Any, tolerance: float = 2e-5) -> None:
    """Values and gradients of the fused program are those of the expected one in float64."""
    given = value_and_gradients(jax_bnar.fuse(program))(*args)
    exact = value_and_gradients(expected)(*in_float64(args))
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(exact), strict=True):
        assert error(a, b) <= tolerance * (1 + float(np.max(np.abs(b))))
