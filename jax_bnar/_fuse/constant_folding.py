"""What a program computes from literals alone: counts, `ddof`, branches that constants select.

Recognition reads these values. The program that `fuse` returns computes them itself, by its own
equations, so a value that is not known here costs a match and never a result.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim

from jax_bnar._fuse import named_axes
from jax_bnar._fuse.dtypes import converted, is_number
from jax_bnar._fuse.nodes import Constant, Operand

# NumPy computes these as XLA does, if it is given operands of the program's own dtypes.
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "not": np.invert,
}
_ON_SIZES: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": lambda a, b: a if a >= b else b,
    "min": lambda a, b: b if a >= b else a,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
_UNCHANGED = frozenset(["copy", "pvary", "stop_gradient"])
_SUMS = frozenset(["psum", "psum_invariant"])


def known_numbers(body: Any) -> dict[Any, Constant]:
    """The numbers among the arrays that a closed jaxpr holds, such as `eps = jnp.float32(1e-5)`.

    An array that is being traced, or lies on devices of other processes, is not known.
    """
    if not (held := getattr(body, "consts", ())):
        return {}
    # Whoever forbids transfers means arrays, and would not expect tracing to fail.
    with jax.transfer_guard_device_to_host("allow"):
        return {
            variable: Constant(variable.aval, np.asarray(array)[()])
            for variable, array in zip(body.jaxpr.constvars, held, strict=True)
            # A mutable array (`jax.Ref`) has a shape and a dtype, too.
            if type(variable.aval) is jax.core.ShapedArray
            and variable.aval.shape == ()
            and is_number(variable.aval.dtype)
            and not isinstance(array, jax.core.Tracer)
            and getattr(array, "is_fully_addressable", True)
            and not (isinstance(array, jax.Array) and array.is_deleted())
        }


def fold(
    equation: Any, operands: Sequence[Operand], axis_sizes: Mapping[Any, int]
) -> Sequence[Operand | None]:
    """What each of the equation's results is equal to, a constant or an operand, if it is known."""
    if equation.primitive.name in _SUMS:
        return [
            _summed(equation.params, operand, result.aval, axis_sizes)
            for operand, result in zip(operands, equation.outvars, strict=True)
        ]
    if len(equation.outvars) != 1:
        return [None] * len(equation.outvars)  # such as a debug.print, which has none
    return [_folded(equation, operands)]


def _summed(
    params: Mapping[str, Any], operand: Operand, aval: Any, axis_sizes: Mapping[Any, int]
) -> Operand | None:
    """The sum over mapped axes of a number that is the same on all devices, such as a count."""
    names = named_axes.summed_axes(params, axis_sizes)
    if names is None or not _is_number(operand) or is_symbolic_dim(operand.value):
        return None
    if named_axes.dims_of(params):
        return None
    count = math.prod(named_axes.size_of(name, axis_sizes) for name in names)
    value = np.asarray(operand.value, operand.dtype)
    return Constant(aval, (value * count).astype(aval.dtype)[()])


def _folded(equation: Any, operands: Sequence[Operand]) -> Operand | None:
    name = equation.primitive.name
    if name == "dim_as_value":
        return Constant(equation.outvars[0].aval, equation.params["dim"])
    if name == "select_n":
        return _chosen(operands)
    constants = [operand for operand in operands if _is_number(operand)]
    if not constants or len(constants) < len(operands):
        return None
    aval = equation.outvars[0].aval
    if name in _UNCHANGED:
        value = constants[0].value
    elif name == "convert_element_type":
        value = converted(constants[0].value, constants[0].dtype, aval.dtype)
    elif any(is_symbolic_dim(constant.value) for constant in constants):
        value = _of_sizes(name, constants)
    else:
        value = _of_numbers(name, constants, aval.dtype)
    return None if value is None else Constant(aval, value)


def _chosen(operands: Sequence[Operand]) -> Operand | None:
    """The case that a constant selects; like XLA, this takes the nearest index that there is."""
    which = operands[0]
    if not _is_number(which) or is_symbolic_dim(which.value):
        return None
    return operands[1 + min(max(int(which.value), 0), len(operands) - 2)]


def _of_numbers(name: str, constants: Sequence[Constant], dtype: Any) -> Any:
    if name not in _ON_NUMBERS:
        return None
    if name == "div" and not jnp.issubdtype(dtype, jnp.floating):
        return None  # lax rounds the quotient of integers towards zero, but NumPy does not
    with np.errstate(all="ignore"):
        operands = (np.asarray(constant.value, constant.dtype) for constant in constants)
        return np.asarray(_ON_NUMBERS[name](*operands)).astype(dtype)[()]


def _of_sizes(name: str, constants: Sequence[Constant]) -> Any:
    """The result of integers and of symbolic sizes (jax.export)."""
    values = [
        constant.value if is_symbolic_dim(constant.value) else float(constant.value)
        for constant in constants
    ]
    if name not in _ON_SIZES or any(isinstance(v, float) and v != int(v) for v in values):
        return None
    try:
        return _ON_SIZES[name](*(int(v) if isinstance(v, float) else v for v in values))
    except InconclusiveDimensionOperation:
        return None


def _is_number(operand: Operand) -> TypeGuard[Constant]:
    return isinstance(operand, Constant) and operand.shape == () and is_number(operand.dtype)
