"""Dtype rules: the dtypes that x may have, and the precision of the arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SUPPORTED = tuple(np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """float64 for float64 data, float32 for all other dtypes."""
    return np.dtype(np.float64) if np.dtype(dtype) == np.float64 else np.dtype(np.float32)


def without_x64(dtype: Any) -> np.dtype:
    """The dtype that JAX's arrays have if this one is asked for: float64 needs `jax_enable_x64`.

    Raises:
        TypeError: it is no dtype.
    """
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def is_wide(dtype: np.dtype) -> bool:
    """Whether arithmetic has no more digits than this dtype stores."""
    return accumulation_dtype(dtype) == dtype


def is_widened_by_operator(dtype: np.dtype, out_dtype: np.dtype) -> bool:
    """Whether the operators give a y of another dtype, `out_dtype`, for an x of `dtype`."""
    return dtype in SUPPORTED and dtype.itemsize == 2 and out_dtype == np.float32


def smallest_epsilon(dtype: np.dtype) -> float:
    """The smallest normal number of the accumulation dtype.

    A smaller epsilon would underflow to 0 and turn a constant channel into NaN.
    """
    return float(np.finfo(accumulation_dtype(dtype)).tiny)
