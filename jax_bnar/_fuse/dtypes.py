"""What the dtypes of a program can hold, and its constants in other dtypes."""

import functools
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from jax_bnar._base.dtypes import SUPPORTED

_SUPPORTED_NAMES: Final = tuple(dtype.name for dtype in SUPPORTED)


def converted(value: Any, before: Any, after: Any) -> Any:
    """A number of the dtype `before` in the dtype `after`, or None if it is not known.

    A symbolic size (jax.export) stays what it is.
    """
    if is_symbolic_dim(value):
        return value
    if not (is_number(before) and is_number(after)):
        return None
    value = np.asarray(value, before)
    if value.dtype.kind not in "biu" and np.dtype(after).kind in "iu":
        # XLA clamps where NumPy wraps around.
        limits = np.iinfo(after)
        if not limits.min <= float(value) <= limits.max:
            return None
    with np.errstate(all="ignore"):
        return value.astype(after)[()]


def is_number(dtype: Any) -> bool:
    """Whether the dtype is one of booleans, integers or real floating-point numbers."""
    return jnp.issubdtype(dtype, jnp.bool_) or (
        jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


def is_real(dtype: Any) -> bool:
    """Whether the operators take arrays of this dtype, which may be an extended dtype of JAX."""
    return getattr(dtype, "name", None) in _SUPPORTED_NAMES


@functools.cache
def holds(wide: Any, narrow: Any) -> bool:
    """Whether every number of the dtype `narrow` is also a number of `wide`."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp
