"""What a layer checks of the arguments of a call, besides the operators' own checks."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.dtypes import SUPPORTED
from jax_bnar._operators.validation import as_array, check_shape_like, check_where

_Norm = TypeVar("_Norm")


def checked_norm(norm: Any, kind: type[_Norm], layers: str) -> _Norm:
    """The norm of a `Shortcut`, which must be a layer of this class."""
    if not isinstance(norm, kind):
        raise TypeError(
            f"BatchNorm: the norm of a Shortcut must be a jax_bnar.{layers}.BatchNorm, got"
            f" {type(norm).__name__}; pass its result as the residual instead."
        )
    return norm


def checked_residual(residual: Any, x: jax.Array) -> jax.Array | None:
    if residual is None:
        return None
    residual = as_array("BatchNorm", "residual", residual)
    check_shape_like("BatchNorm", "residual", residual, x)
    return residual


def checked_mask(mask: Any, x: jax.Array) -> jax.Array | None:
    """The mask with as many axes as x, each as long as that of x or of length 1.

    Numbers are taken as Flax takes them: each but 0 selects.

    Raises:
        ValueError: it cannot be broadcast to x.
        TypeError: it consists of something else, such as strings.
    """
    if mask is None:
        return None
    mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
    if not (jnp.issubdtype(mask.dtype, bool) or jnp.issubdtype(mask.dtype, jnp.number)):
        raise TypeError(
            "BatchNorm: mask must be an array of bool, or of numbers of which each but 0 selects,"
            f" got dtype {mask.dtype}."
        )
    return check_where("BatchNorm", "mask", jnp.asarray(mask, bool), x)


def require_real(x: jax.Array, result: Any, instead: str) -> None:
    for name, dtype in (("x", x.dtype), ("the result", result)):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            names = ", ".join(supported.name for supported in SUPPORTED)
            raise TypeError(
                f"BatchNorm: {name} has the complex dtype {np.dtype(dtype)}, but the operators take"
                f" real numbers: {names}, or integers; use {instead}, which takes complex x."
            )
