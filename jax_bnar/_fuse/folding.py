"""Folds constant scalars while matching: counts, `ddof`, branches that constants select."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_bnar._fuse.nodes import Constant, Operand

_SCALAR: dict[str, Callable[..., Any]] = {
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
    "not": np.logical_not,
    "convert_element_type": lambda value: value,
    "copy": lambda value: value,
    "stop_gradient": lambda value: value,
}


def fold(equation: Any, operands: Sequence[Operand]) -> Operand | None:
    """The operand that replaces the equation's result, or None if the equation has to run."""
    name = equation.primitive.name
    chosen = operands[0] if name == "select_n" else None
    if isinstance(chosen, Constant) and chosen.shape == ():
        return operands[1 + int(chosen.value)]
    constants = [o for o in operands if isinstance(o, Constant) and o.shape == ()]
    if name not in _SCALAR or len(constants) < len(operands):
        return None
    aval = equation.outvars[0].aval
    if name == "div" and not np.issubdtype(aval.dtype, np.inexact):
        return None  # lax rounds the quotient of integers towards zero, but NumPy does not
    with np.errstate(all="ignore"):
        value = _SCALAR[name](*(np.asarray(operand.value) for operand in constants))
    return Constant(aval, np.asarray(value).astype(aval.dtype)[()])
