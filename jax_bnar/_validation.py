"""Checks of the arguments, at trace time: each error says what was given and what was expected."""

import math
import numbers
import operator
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_bnar._canonical import CanonicalShape, canonical_shape
from jax_bnar._config import Save
from jax_bnar._dtypes import SUPPORTED, accumulation_dtype


class Operands(NamedTuple):
    """Validated operands in canonical form; vectors have shape (1, C) and accumulation dtype."""

    x: jax.Array
    z: jax.Array | None
    scale: jax.Array | None
    bias: jax.Array | None
    shape: CanonicalShape


def check_epsilon(function: str, epsilon: Any) -> float:
    if isinstance(epsilon, jax.core.Tracer):
        raise TypeError(
            f"{function}: epsilon must be a static Python number, got a traced value; mark it as"
            " static (jax.jit static_argnames) or close over it."
        )
    if isinstance(epsilon, bool) or not isinstance(epsilon, (numbers.Real, np.ndarray, jax.Array)):
        raise TypeError(
            f"{function}: epsilon must be a positive number, got {type(epsilon).__name__}."
        )
    value = float(cast(float, epsilon))
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{function}: epsilon must be finite and > 0, got {value}.")
    return value


def check_save(function: str, save: Any) -> Save:
    if save not in get_args(Save):
        raise ValueError(f"{function}: save must be 'y' or 'mask', got {save!r}.")
    return save


def check_axis_name(function: str, axis_name: Any, axis_index_groups: Any) -> None:
    for name, value in (("axis_name", axis_name), ("axis_index_groups", axis_index_groups)):
        if value is not None:
            raise NotImplementedError(
                f"{function}: {name}={value!r} is not implemented yet; statistics are those of the"
                f" array that the call sees. Leave {name}=None."
            )


def check_operands(
    function: str, x: Any, z: Any, scale: Any, bias: Any, *, axis: Any, num_groups: Any = 1
) -> Operands:
    x = _check_x(function, x)
    axis = _check_axis(function, axis, x.shape)
    num_groups = _check_num_groups(function, num_groups, axis, x.shape)
    shape = canonical_shape(x.shape, axis, num_groups)
    if z is not None:
        z = _check_z(function, z, x).reshape(shape)
    return Operands(
        x=x.reshape(shape),
        z=z,
        scale=check_vector(function, "scale", scale, x, axis),
        bias=check_vector(function, "bias", bias, x, axis),
        shape=shape,
    )


def check_vector(function: str, name: str, vector: Any, x: Any, axis: int) -> jax.Array | None:
    """A per-channel operand as a (1, C) array in the accumulation dtype; None stays None."""
    if vector is None:
        return None
    vector = _as_array(function, name, vector)
    channels = x.shape[axis]
    if vector.shape != (channels,):
        raise ValueError(
            f"{function}: {name} must have shape ({channels},), one value for each channel (axis"
            f" {axis} of x, whose shape is {x.shape}), got shape {vector.shape}."
        )
    if not jnp.issubdtype(vector.dtype, jnp.floating):
        raise TypeError(f"{function}: {name} must have a float dtype, got {vector.dtype}.")
    return vector.astype(accumulation_dtype(x.dtype)).reshape(1, channels)


def check_statistic(function: str, name: str, vector: Any, x: Any, axis: int) -> jax.Array:
    """mean or var of an inference form: like `check_vector`, but it may not be left out."""
    checked = check_vector(function, name, vector, x, axis)
    if checked is None:
        raise TypeError(f"{function}: {name} must be an array, got None.")
    return checked


def _as_array(function: str, name: str, value: Any) -> jax.Array:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{function}: {name} must be an array, got {type(value).__name__}.")
    return jnp.asarray(value)


def _check_x(function: str, x: Any) -> jax.Array:
    x = _as_array(function, "x", x)
    if x.dtype not in SUPPORTED:
        names = ", ".join(d.name for d in SUPPORTED)
        raise TypeError(f"{function}: x must have one of the dtypes {names}, got {x.dtype}.")
    if x.ndim < 2:
        raise ValueError(
            f"{function}: x must have at least 2 dimensions (a batch and a channel axis), got shape"
            f" {x.shape}."
        )
    if x.size == 0:
        raise ValueError(
            f"{function}: x must not be empty, got shape {x.shape}: the statistics of no element"
            " are not defined."
        )
    return x


def _check_axis(function: str, axis: Any, shape: tuple[int, ...]) -> int:
    ndim = len(shape)
    try:
        index = operator.index(axis)
    except TypeError:
        raise TypeError(
            f"{function}: axis must be one integer, got {axis!r} of type {type(axis).__name__}."
        ) from None
    if not -ndim <= index < ndim:
        raise ValueError(
            f"{function}: axis must lie in [{-ndim}, {ndim}) for x of shape {shape}, got {index}."
        )
    return index % ndim


def _check_num_groups(function: str, num_groups: Any, axis: int, shape: tuple[int, ...]) -> int:
    try:
        groups = operator.index(num_groups)
    except TypeError:
        raise TypeError(
            f"{function}: num_groups must be an integer, got {num_groups!r} of type"
            f" {type(num_groups).__name__}."
        ) from None
    if groups < 1:
        raise ValueError(f"{function}: num_groups must be at least 1, got {groups}.")
    if groups > 1 and axis == 0:
        raise ValueError(
            f"{function}: num_groups={groups} splits the leading axis of x, but axis=0 makes that"
            f" the channel axis (x has shape {shape}); move the channels behind the batch."
        )
    if shape[0] % groups:
        raise ValueError(
            f"{function}: num_groups must divide the leading axis of x, got num_groups={groups} for"
            f" x of shape {shape}."
        )
    return groups


def _check_z(function: str, z: Any, x: jax.Array) -> jax.Array:
    z = _as_array(function, "z", z)
    if z.shape != x.shape:
        raise ValueError(
            f"{function}: z must have the shape of x, {x.shape}, got {z.shape}; z is not broadcast"
            " (use jnp.broadcast_to where that is meant)."
        )
    if z.dtype != x.dtype:
        raise TypeError(
            f"{function}: z must have the dtype of x, {x.dtype}, got {z.dtype}; cast it with"
            " z.astype(x.dtype)."
        )
    return z
