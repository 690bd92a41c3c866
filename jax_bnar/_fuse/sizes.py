"""Sizes of axes: integers, or symbolic ones where `jax.export` traces a program for many shapes.

Comparing symbolic sizes raises an error where the answer depends on their values.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim

# An int or an expression in the variables of a `jax.export.SymbolicScope`.
Size = Any


def is_long(size: Size) -> bool:
    """Whether an axis of this size varies along its length; a symbolic one does."""
    return is_symbolic_dim(size) or size > 1


def is_at_least(size: Size, other: Size) -> bool:
    """Whether size >= other; if that is unknown, a symbolic size counts as the larger one."""
    try:
        return size >= other
    except InconclusiveDimensionOperation:
        return is_symbolic_dim(size)


def of_each_symbol_one(shape: Sequence[Size]) -> int:
    """The number of elements, where symbolic sizes count as 1."""
    return math.prod(1 if is_symbolic_dim(size) else size for size in shape)
