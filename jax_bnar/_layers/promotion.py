"""The dtype in which a layer runs its operator."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.dtypes import SUPPORTED


def promoted(*dtypes: Any) -> np.dtype:
    """JAX's dtype promotion, even if the user has made implicit promotion an error.

    Python's own types, such as `float`, are weak in it, as in Flax.
    """
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))


def scalar_of(dtype: Any) -> np.ndarray[Any, Any] | None:
    """An array of this dtype, for Flax's promotion, which takes arrays; None for None."""
    return None if dtype is None else np.zeros((), dtype)


def compute_dtype(*dtypes: Any) -> np.dtype:
    """The dtype in which an operator runs so that no operand loses precision.

    It is the promotion of the given dtypes. Those that the operators do not support count as
    float32: integers, as in Flax, and float8, with which Flax's layer does not compute.
    """
    return promoted(*(d if np.dtype(d) in SUPPORTED else np.float32 for d in dtypes))
