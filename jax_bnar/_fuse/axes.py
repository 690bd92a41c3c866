"""Labels say which axes of x each axis of a value runs along: a label is the tuple of those axes.

An axis of the value that x does not have, of size 1 or repeated, has the label ().
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax_bnar._fuse.sizes import is_long

Labels = tuple[tuple[Any, ...], ...]

# The axis along which several statistics are stacked.
STACK = -1


def own(shape: Sequence[int]) -> Labels:
    """The labels of x itself."""
    return tuple((axis,) if is_long(size) else () for axis, size in enumerate(shape))


def merged(shape: Sequence[int], operands: Sequence[tuple[Sequence[int], Labels]]) -> Labels | None:
    """The labels of an elementwise result, from the operands' shapes and labels.

    They are None if an axis of x would be there twice, as in an outer product of x with itself,
    whose elements combine different elements of x.
    """
    result: list[tuple[Any, ...]] = [()] * len(shape)
    for own_shape, labels in operands:
        if not own_shape:
            continue
        if len(own_shape) != len(shape):
            return None
        for axis, label in enumerate(labels):
            if label and result[axis] and label != result[axis]:
                return None
            result[axis] = result[axis] or label
    axes = [axis for label in result for axis in label]
    return tuple(result) if len(axes) == len(set(axes)) else None


def reshaped(
    before: Sequence[int], labels: Labels, after: Sequence[int], sizes: Mapping[Any, int]
) -> Labels | None:
    """The labels after a reshape that merges whole axes of x or splits them again.

    They are None if the reshape cuts an axis of x.
    """
    pieces: list[tuple[int, tuple[Any, ...]]] = []
    for size, label in zip(before, labels, strict=True):
        if label:
            pieces.extend((sizes[axis], (axis,)) for axis in label)
        elif is_long(size):
            pieces.append((size, ()))
    pieces.reverse()
    result = []
    for size in after:
        parts = []
        while pieces and math.prod(n for n, _ in parts) != size:
            parts.append(pieces.pop())
        if math.prod(n for n, _ in parts) != size or (
            len(parts) > 1 and any(not p for _, p in parts)
        ):
            return None
        result.append(tuple(axis for _, label in parts for axis in label))
    return None if pieces else tuple(result)


def in_order(labels: Labels, axes: Sequence[int]) -> bool:
    """Whether the labels hold exactly these axes of x in this order, so that a reshape suffices."""
    return [axis for label in labels for axis in label] == list(axes)
