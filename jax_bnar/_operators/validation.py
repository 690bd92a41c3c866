"""Checks of the arguments at trace time. Each error says what was given and what was expected."""

import math
import numbers
import operator
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.activations import Activation, may_widen
from jax_bnar._base.config import Save
from jax_bnar._base.dtypes import SUPPORTED, accumulation_dtype, is_widened_by_operator, without_x64
from jax_bnar._base.inputs import Affine, numbered
from jax_bnar._base.layout import ChannelLayout


class Operands(NamedTuple):
    """Validated operands; vectors have shape (1, C) and the accumulation dtype."""

    x: tuple[jax.Array, ...]
    z: jax.Array | None
    affine: tuple[Affine, ...]
    layout: ChannelLayout


def require_static(function: str, name: str, number: Any) -> None:
    """Refuses a traced value for a number that decides which program is compiled."""
    if isinstance(number, jax.core.Tracer):
        raise _traced(function, name, "a static Python number")


def _traced(function: str, name: str, expected: str) -> TypeError:
    return TypeError(
        f"{function}: {name} must be {expected}, got a traced value; mark it as static (jax.jit"
        " static_argnames) or close over it."
    )


def check_integer(function: str, name: str, value: Any, kind: str = "an integer") -> int:
    """`value` as an int. A bool, which Python counts among them, is taken for a mistake."""
    require_static(function, name, value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {name} must be {kind}, got {value!r} of type {type(value).__name__}."
        ) from None


def check_count(function: str, name: str, value: Any) -> int:
    count = check_integer(function, name, value)
    if count < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {count}.")
    return count


def check_momentum(function: str, name: str, momentum: Any) -> float:
    """The weight of an old running value."""
    require_static(function, name, momentum)
    if isinstance(momentum, bool) or not isinstance(momentum, numbers.Real):
        raise TypeError(
            f"{function}: {name} must be a number from 0 to 1, got {momentum!r} of type"
            f" {type(momentum).__name__}."
        )
    value = float(momentum)
    if not 0 <= value <= 1:
        raise ValueError(
            f"{function}: {name} is the weight of the old running value, from 0 to 1, got {value}."
        )
    return value


def check_epsilon(function: str, epsilon: Any, name: str = "epsilon") -> float:
    require_static(function, name, epsilon)
    if isinstance(epsilon, bool) or not isinstance(epsilon, (numbers.Real, np.ndarray, jax.Array)):
        raise TypeError(
            f"{function}: {name} must be a positive number, got {type(epsilon).__name__}."
        )
    if (shape := getattr(epsilon, "shape", ())) != ():
        raise TypeError(f"{function}: {name} must be a positive number, got shape {shape}.")
    if jnp.issubdtype(getattr(epsilon, "dtype", float), bool):
        raise TypeError(f"{function}: {name} must be a positive number, got {epsilon!r}.")
    try:
        value = float(cast(float, epsilon))
    except OverflowError:
        value = math.inf
    except (ValueError, TypeError) as error:
        raise type(error)(
            f"{function}: {name} must be a positive number, got {epsilon!r:.60}."
        ) from None
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{function}: {name} must be finite and > 0, got {value}.")
    largest = float(np.finfo(np.float32).max)
    if value > largest:  # It would be infinite where the arithmetic runs in float32.
        raise ValueError(f"{function}: {name} must be at most {largest:.3g}, got {value}.")
    # A subnormal epsilon would count as 0 in the threads of XLA that run the kernels.
    return max(value, float(np.finfo(np.float64).tiny))


def check_flag(function: str, name: str, value: Any, instead: str = "") -> bool:
    """A flag on which the program branches: a bool, or a number or array that stands for one.

    Raises:
        TypeError: it is traced, or something else; then the message ends in `instead`.
    """
    shape = getattr(value, "shape", ())
    is_number = isinstance(value, int | np.integer) and value in (0, 1)
    if is_number or (shape == () and jnp.issubdtype(getattr(value, "dtype", object), bool)):
        try:  # Not every traced value is unknown: one under jax.jvp alone has a value.
            return bool(value)
        except jax.errors.TracerBoolConversionError:
            raise _traced(function, name, "a static bool") from None
    raise TypeError(
        f"{function}: {name} must be True or False, got {described_value(value)}.{instead}"
    )


def check_save(function: str, save: Any) -> Save:
    if not isinstance(save, str) or save not in get_args(Save):
        raise ValueError(f"{function}: save must be 'y' or 'mask', got {save!r}.")
    return cast(Save, save)


def check_operands(
    function: str,
    x: tuple[Any, ...],
    z: Any,
    affine: tuple[Affine, ...],
    *,
    axis: Any,
    num_groups: Any = 1,
    out_dtype: Any = None,
    may_be_empty: bool = False,
) -> Operands:
    """The operands of y = act(sum of batch_norm(x) over the inputs + z)."""
    inputs = len(x)
    name, *other_names = numbered("x", inputs)
    first = check_x(function, x[0], name, may_be_empty=may_be_empty)
    axis = _check_axis(function, axis, first.shape, name)
    num_groups = _check_num_groups(function, num_groups, axis, first.shape, name)
    others = (
        check_like(function, other_name, other, first, name)
        for other_name, other in zip(other_names, x[1:], strict=True)
    )
    return Operands(
        x=(first, *others),
        z=None if z is None else _check_residual(function, z, first, out_dtype),
        affine=tuple(
            Affine(
                check_vector(function, scale_name, affine_i.scale, first, axis, name),
                check_vector(function, bias_name, affine_i.bias, first, axis, name),
            )
            for scale_name, bias_name, affine_i in zip(
                numbered("scale", inputs), numbered("bias", inputs), affine, strict=True
            )
        ),
        layout=ChannelLayout(axis, num_groups),
    )


def check_x(function: str, x: Any, name: str = "x", *, may_be_empty: bool = False) -> jax.Array:
    """x as an array of a supported dtype, with a batch axis and a channel axis."""
    x = as_array(function, name, x)
    if x.dtype not in SUPPORTED:
        names = ", ".join(d.name for d in SUPPORTED)
        raise TypeError(f"{function}: {name} must have one of the dtypes {names}, got {x.dtype}.")
    if x.ndim < 2:
        raise ValueError(
            f"{function}: {name} must have at least 2 dimensions (a batch and a channel axis), got"
            f" shape {x.shape}."
        )
    if x.size == 0 and not may_be_empty:
        raise ValueError(
            f"{function}: {name} must not be empty, got shape {x.shape}; statistics of zero"
            " elements are undefined."
        )
    return x


def check_vector(
    function: str, name: str, vector: Any, x: Any, axis: int, x_name: str = "x"
) -> jax.Array | None:
    """A per-channel operand as a (1, C) array in the accumulation dtype; None stays None."""
    if vector is None:
        return None
    vector = as_array(function, name, vector)
    channels = x.shape[axis]
    if vector.shape != (channels,):
        raise ValueError(
            f"{function}: {name} must have shape ({channels},), one value for each channel (axis"
            f" {axis} of {x_name}, whose shape is {x.shape}), got shape"
            f" {vector.shape}{_another_axis(vector.shape, x.shape, x_name)}."
        )
    if not jnp.issubdtype(vector.dtype, jnp.floating):
        raise TypeError(f"{function}: {name} must have a float dtype, got {vector.dtype}.")
    return vector.astype(accumulation_dtype(x.dtype)).reshape(1, channels)


def _another_axis(given: tuple[int, ...], shape: tuple[int, ...], x_name: str) -> str:
    axes = [axis for axis, size in enumerate(shape) if axis > 0 and given == (size,)]
    return f"; if axis {axes[0]} of {x_name} is that of the channels, say so" if axes else ""


def check_like(function: str, name: str, value: Any, x: Any, x_name: str = "x") -> jax.Array:
    """An operand with the shape and the dtype of x."""
    array = as_array(function, name, value)
    check_shape_like(function, name, array, x, x_name)
    if array.dtype != x.dtype:
        raise TypeError(
            f"{function}: {name} must have the dtype of {x_name}, {x.dtype}, got {array.dtype};"
            f" cast it with {name}.astype({x_name}.dtype)."
        )
    return array


def _check_residual(function: str, z: Any, x: Any, out_dtype: Any) -> jax.Array:
    """z, which has the shape of x and the dtype of y."""
    dtype = check_out_dtype(function, out_dtype, x.dtype)
    if dtype is None:
        return check_like(function, "z", z, x)
    array = as_array(function, "z", z)
    check_shape_like(function, "z", array, x)
    if array.dtype != dtype:
        raise TypeError(
            f"{function}: z must have the dtype of y, {dtype} (out_dtype), got {array.dtype}; cast"
            f" it with z.astype({str(dtype)!r})."
        )
    return array


def check_out_dtype(
    function: str, out_dtype: Any, x_dtype: Any, activation: Activation = "none"
) -> np.dtype | None:
    """The dtype of y, or None if it is that of x."""
    if out_dtype is None:
        return None
    try:
        dtype = without_x64(out_dtype)
    except TypeError:
        raise TypeError(f"{function}: out_dtype must be a dtype, got {out_dtype!r}.") from None
    if dtype == x_dtype:
        return None
    if not is_widened_by_operator(x_dtype, dtype):
        others = ", or float32" if x_dtype.itemsize == 2 else ""
        raise TypeError(
            f"{function}: out_dtype must be the dtype of x, {x_dtype}{others}, got {dtype}; cast"
            f" the result with y.astype({str(dtype)!r})."
        )
    if not may_widen(activation):
        raise ValueError(
            f"{function}: out_dtype must be None or the dtype of x with activation {activation!r},"
            f" got {dtype} for an x of {x_dtype}; pass x.astype({str(dtype)!r}) instead."
        )
    return dtype


def check_shape_like(function: str, name: str, array: jax.Array, x: Any, x_name: str = "x") -> None:
    if array.shape != x.shape:
        raise ValueError(
            f"{function}: {name} must have the shape of {x_name}, {x.shape}, got {array.shape};"
            f" {name} is not broadcast (use jnp.broadcast_to if you want that)."
        )


def check_where(function: str, name: str, where: Any, x: Any) -> jax.Array:
    """A selection of elements of x, with as many axes as x, each as long as that of x or 1."""
    where = as_array(function, name, where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"{function}: {name} must have dtype bool, got {where.dtype}.")
    axes = (1,) * (x.ndim - where.ndim) + where.shape
    if len(axes) > x.ndim or any(n not in (1, size) for n, size in zip(axes, x.shape, strict=True)):
        raise ValueError(
            f"{function}: {name} must broadcast to the shape of x, {x.shape}, got {where.shape}."
        )
    return where.reshape(axes)


def check_statistic(
    function: str, name: str, vector: Any, x: Any, axis: int, x_name: str = "x"
) -> jax.Array:
    """mean or var of an inference form: like `check_vector`, but it must not be None."""
    checked = check_vector(function, name, vector, x, axis, x_name)
    if checked is None:
        raise TypeError(f"{function}: {name} must be an array, got None.")
    return checked


def described_value(value: Any) -> str:
    """A value as an error shows it: of an array, which may be large, the shape alone."""
    return f"an array of shape {value.shape}" if getattr(value, "shape", ()) else f"{value!r}"


def as_array(function: str, name: str, value: Any) -> jax.Array:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{function}: {name} must be an array, got {type(value).__name__}.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        # Such as a ShapeDtypeStruct, or a NumPy array of objects or of a foreign byte order.
        raise TypeError(
            f"{function}: {name} must be an array that JAX takes, got {type(value).__name__} of"
            f" dtype {value.dtype}."
        ) from None


def _check_axis(function: str, axis: Any, shape: tuple[int, ...], x_name: str) -> int:
    ndim = len(shape)
    index = check_integer(function, "axis", axis, "a single integer")
    if not -ndim <= index < ndim:
        raise ValueError(
            f"{function}: axis must lie in [{-ndim}, {ndim}) for {x_name} of shape {shape}, got"
            f" {index}."
        )
    return index % ndim


def _check_num_groups(
    function: str, num_groups: Any, axis: int, shape: tuple[int, ...], x_name: str
) -> int:
    groups = check_count(function, "num_groups", num_groups)
    if groups > 1 and axis == 0:
        raise ValueError(
            f"{function}: num_groups={groups} splits the leading axis of {x_name}, but axis=0 makes"
            f" that the channel axis ({x_name} has shape {shape}); move the channels after the"
            " batch axis."
        )
    if shape[0] % groups:
        raise ValueError(
            f"{function}: num_groups must divide the leading axis of {x_name}, got"
            f" num_groups={groups} for {x_name} of shape {shape}."
        )
    return groups
