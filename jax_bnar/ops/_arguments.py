"""Shared by the operators of other systems: checks of attributes, and running statistics."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.layout import ChannelLayout


def check_data_format(
    function: str, data_format: Any, axes: Mapping[str, int], shape: tuple[int, ...]
) -> ChannelLayout:
    """The layout of an array of this shape; `axes` maps each format to its channel axis."""
    if not isinstance(data_format, str) or data_format not in axes:
        names = " or ".join(map(repr, axes))
        raise ValueError(f"{function}: data_format must be {names}, got {data_format!r}.")
    return ChannelLayout(axes[data_format] % len(shape))


def check_mask(
    function: str, name: str, mask: Any, layout: ChannelLayout, shape: tuple[int, ...]
) -> jax.Array:
    """Checks the bit mask that a forward operator returned for an array of this shape."""
    if not (hasattr(mask, "shape") and hasattr(mask, "dtype")):
        raise TypeError(f"{function}: {name} must be an array, got {type(mask).__name__}.")
    expected = layout.mask_shape(shape)
    if mask.dtype != np.uint8:
        raise TypeError(f"{function}: {name} must have dtype uint8, got {mask.dtype}.")
    mask = jnp.asarray(mask)
    if math.prod(mask.shape) == math.prod(expected):
        # A program with symbolic shapes (jax.export) gives the same bytes in another shape.
        mask = mask.reshape(expected)
    if mask.shape != expected:
        raise ValueError(
            f"{function}: {name} must have shape {expected}, as the forward operator gives it for"
            f" an array of shape {shape}, got {mask.shape}."
        )
    return mask


def moved(
    running: jax.Array, batch: jax.Array, momentum: float, dtype: Any, factor: Any = 1.0
) -> jax.Array:
    """momentum*running + (1-momentum)*factor*batch as `dtype`, from operands of shape (1, C)."""
    old, new = (jnp.asarray(w).astype(batch.dtype) for w in (momentum, (1 - momentum) * factor))
    return (old * running + new * batch)[0].astype(dtype)


def unbiased_factor(layout: ChannelLayout, shape: tuple[int, ...]) -> Any:
    """n/(n-1) for n elements per channel; 1 for a single element, whose variance is 0 anyway.

    It is an array if the shape is symbolic (jax.export).
    """
    count = math.prod(shape) // shape[layout.axis]
    if isinstance(count, int):
        return count / max(count - 1, 1)
    wide = jnp.asarray(count).astype(np.float32)
    return wide / jnp.maximum(wide - 1, jnp.ones_like(wide))
