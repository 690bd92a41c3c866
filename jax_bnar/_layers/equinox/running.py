"""The averages in the state of Equinox's BatchNorm, with its rules for both modes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._layers.promotion import compute_dtype, promoted
from jax_bnar._layers.statistics import BatchStatistics, running_average

_Pair = tuple[jax.Array, jax.Array]


def averages(layer: eqx.nn.BatchNorm, state: eqx.nn.State) -> _Pair:
    """(mean, var) that normalise in inference.

    `mode="batch"` divides by `1 - momentum**counter`, unless there has been no batch. That corrects
    a mean that began at 0; the variance begins at 1 and is divided all the same.
    """
    if layer.mode == "ema":
        return state.get(_present(layer.ema_state_index))
    mean, var = state.get(_present(layer.batch_state_index))
    counter = state.get(_present(layer.batch_counter))
    wide = promoted(mean.dtype, np.float32)
    weight_of_old = jnp.power(jnp.asarray(layer.momentum, wide), counter.astype(wide))
    one = jnp.ones((), wide)
    total = jnp.where(counter == 0, one, one - weight_of_old)
    return _divided(mean, total), _divided(var, total)


def mixed(layer: eqx.nn.BatchNorm, x: jax.Array, state: eqx.nn.State) -> tuple[_Pair, eqx.nn.State]:
    """`mode="ema"` in training: the averages with this batch in them, and their state.

    The first batch replaces what the state was initialised with.
    """
    is_first = state.get(_present(layer.ema_first_time_index))
    old = state.get(_present(layer.ema_state_index))
    batch = _batch_statistics(x, layer.axis_name)

    def updated(old: jax.Array, batch: jax.Array) -> jax.Array:
        result = promoted(old.dtype, x.dtype)
        average = running_average(old, batch, layer.momentum, dtype=x.dtype)
        return jnp.where(is_first, batch.astype(result), average)

    mean, var = (updated(*pair) for pair in zip(old, batch, strict=True))
    # Derived from the old value, as inside a `shard_map` its type names the mesh.
    state = state.set(_present(layer.ema_first_time_index), jnp.logical_and(is_first, False))
    stored = mean.astype(old[0].dtype), var.astype(old[1].dtype)
    return (mean, var), state.set(_present(layer.ema_state_index), stored)


def counted(
    layer: eqx.nn.BatchNorm, statistics: BatchStatistics, state: eqx.nn.State
) -> eqx.nn.State:
    """`mode="batch"` in training: the state after a batch with these statistics."""
    counter = state.get(_present(layer.batch_counter))
    old = state.get(_present(layer.batch_state_index))

    def updated(old: jax.Array, batch: jax.Array) -> jax.Array:
        return running_average(old, batch, layer.momentum, dtype=old.dtype)

    new = updated(old[0], statistics.mean), updated(old[1], statistics.var)
    state = state.set(_present(layer.batch_counter), counter + 1)
    return state.set(_present(layer.batch_state_index), new)


def _batch_statistics(x: jax.Array, axis_name: Any) -> _Pair:
    """Mean and population variance of each channel over all examples, in plain JAX.

    They are computed in two passes, as E[x^2]-E[x]^2 would lose the variance if |mean| >> std.
    """
    wide = x.astype(promoted(compute_dtype(x.dtype), np.float32)).reshape(x.shape[0], -1)
    names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    mean = jax.lax.pmean(wide.mean(axis=1), names)
    var = jax.lax.pmean(jnp.square(wide - mean[:, None]).mean(axis=1), names)
    return mean, var


def _divided(array: jax.Array, total: jax.Array) -> jax.Array:
    return (array.astype(total.dtype) / total).astype(array.dtype)


def _present(index: Any) -> Any:
    """The index of a state that exists in the layer's mode."""
    assert index is not None
    return index
