"""What a layer checks of the arguments of a call, besides the operators' own checks."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.dtypes import SUPPORTED
from jax_bnar._base.implementation import resolve_implementation
from jax_bnar._operators.named_axes import check_named_axes, names_in_scope
from jax_bnar._operators.validation import (
    as_array,
    check_count,
    check_flag,
    check_save,
    check_shape_like,
    check_where,
)

_Norm = TypeVar("_Norm")


def described_type(value: Any) -> str:
    """The type of a value with its module, because several libraries have a BatchNorm."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def checked_mode(name: str, value: Any, instead: str = "") -> bool:
    """The flag by which a call evaluates or trains, in whose place a residual may be."""
    return check_flag(
        "BatchNorm", name, value, f" A residual is passed by keyword, residual=z{instead}."
    )


def check_options(function: str, save: Any, implementation: Any, num_groups: Any = 1) -> int:
    """Checks options as the operators do, but where they are written and not in the first call.

    Returns:
        `num_groups` as a Python number: an attribute that is an array would be state in NNX.
    """
    check_save(function, save)
    if implementation is not None:
        resolve_implementation(function, implementation)
    return check_count(function, "num_groups", num_groups)


def check_flags_of_updates(layer: Any) -> None:
    """Checks what Linen's and NNX's layers have of flags about their running statistics."""
    for name in ("unbiased_running_var", "update_batch_stats"):
        check_flag("BatchNorm", name, getattr(layer, name))


def checked_norm(norm: Any, kind: type[_Norm], layers: str) -> _Norm:
    """The norm of a `Shortcut`, which must be a layer of this class that is called as it is."""
    instead = "pass its result as the residual instead"
    if not isinstance(norm, kind):
        raise TypeError(
            f"BatchNorm: the norm of a Shortcut must be a jax_bnar.{layers}.BatchNorm, got"
            f" {described_type(norm)}; {instead}."
        )
    if type(norm).__call__ is not kind.__call__:
        # One call of two norms calls neither of them.
        raise TypeError(
            "BatchNorm: the norm of a Shortcut must not have a __call__ of its own, got"
            f" {described_type(norm)}; {instead}."
        )
    return norm


def check_initial(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Checks what an initializer of running statistics returned, of which Flax checks nothing."""
    if shape != expected:
        raise ValueError(
            f"BatchNorm: {name}(key, shape, dtype) must return an array of the given shape,"
            f" {expected}, got shape {shape}."
        )


def checked_residual(residual: Any, x: jax.Array) -> jax.Array | None:
    if residual is None:
        return None
    if callable(residual):
        raise TypeError(
            f"BatchNorm: residual must be an array, got {described_type(residual)}; pass its"
            " result, or (NNX, Equinox and Haiku) Shortcut(norm, x), which joins two norms in one"
            " call."
        )
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


def check_names_in_scope(
    axis_name: Any, axis_index_groups: Any, argument: str, *, is_optional: bool = True
) -> None:
    """The checks of the operators, for a layer that has another name for `axis_name`, or needs it.

    Raises:
        NameError: there is no such mapped axis in scope.
        ValueError, TypeError: the names or the groups are invalid.
    """
    names, _ = check_named_axes("BatchNorm", axis_name, axis_index_groups, argument)
    with names_in_scope("BatchNorm", axis_name, argument, is_optional=is_optional):
        for name in names:
            jax.lax.axis_size(name)


def require_real(x: jax.Array, result: Any, instead: str) -> None:
    for name, dtype in (("x", x.dtype), ("the result", result)):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            names = ", ".join(supported.name for supported in SUPPORTED)
            raise TypeError(
                f"BatchNorm: {name} has the complex dtype {np.dtype(dtype)}, but the operators take"
                f" real numbers: {names}, or integers; use {instead}, which takes complex x."
            )
