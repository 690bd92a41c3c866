"""Meshes whose axes are parts of another one's, for shardings that this one cannot express.

Reshaping an array divides a mesh axis over array axes: of x with the shape (16, C), sharded by an
axis of 8 devices, `x.reshape(4, 4, C)` has 4 shards along its first axis and 2 along its second. No
spec can say that of a mesh of 8, but P("0", "1") can of one of 4 times 2 with the same devices in
the same order.
"""

import math
from collections.abc import Sequence

import numpy as np

# The sizes of mesh axes, and for each array axis the indices of those that shard it, the major one
# first.
Parts = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def parts_of_axes(tiles: Sequence[int], devices: Sequence[int]) -> Parts | None:
    """The mesh that expresses a sharding, or None if there is none with its devices in order.

    Args:
        tiles: the numbers of shards along each array axis, and then of copies.
        devices: which device has which shard, in row-major order of `tiles`.
    """
    of_tiles = np.asarray(devices).reshape(tiles)
    along = [
        _strided(np.moveaxis(of_tiles, i, 0).reshape(size, -1)[:, 0])
        for i, size in enumerate(tiles)
    ]
    if any(each is None for each in along):
        return None
    order = sorted({part for each in along for part in each or ()}, key=lambda part: -part[1])
    sizes = tuple(size for size, _ in order)
    in_order = np.arange(math.prod(sizes)).reshape(sizes)
    axes = tuple(tuple(order.index(part) for part in each or ()) for each in along)
    permutation = [axis for each in axes for axis in each]
    if in_order.size != of_tiles.size or sorted(permutation) != list(range(len(sizes))):
        return None
    if not np.array_equal(in_order.transpose(permutation).reshape(tiles), of_tiles):
        return None
    return sizes, axes


def _strided(numbers: np.ndarray) -> list[tuple[int, int]] | None:
    """Sizes and strides, the major one first, of nested loops whose counter has these values."""
    numbers = numbers - numbers[0]
    if len(numbers) == 1:
        return []
    stride = int(numbers[1])
    steps = np.arange(len(numbers)) * stride
    size = int(np.argmin(np.append(numbers == steps, False)))
    if len(numbers) % size:
        return None
    rest = _strided(numbers[::size])
    return None if rest is None else [*rest, (size, stride)]
