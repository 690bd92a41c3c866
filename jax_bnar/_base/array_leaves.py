"""The arrays among the leaves of a pytree, apart from its other leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base import jax_compat


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: an array, or a `ShapeDtypeStruct` in the place of one.

    A Python number is not, because a program may branch on it.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        # NumPy reports kind "V" for the dtypes of ml_dtypes.
        extended = leaf.dtype.kind == "V" and jnp.issubdtype(leaf.dtype, jnp.number)
        return leaf.dtype.kind in "biufc" or extended
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or jax_compat.is_token(leaf)


def split_arrays(
    leaves: Sequence[Any],
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The arrays among the leaves, and what returns all leaves with others in their place.

    That function keeps the other leaves (flags, functions, Python numbers), but no array.
    """
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    others = [None if is_array(leaf) else leaf for leaf in leaves]

    def with_arrays(given: Sequence[Any]) -> list[Any]:
        all_leaves = list(others)
        for place, array in zip(places, given, strict=True):
            all_leaves[place] = array
        return all_leaves

    return arrays, with_arrays
