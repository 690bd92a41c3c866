"""Named axes over which a program sums: whole ones, and ones whose indices are in groups.

A mean over groups (`axis_index_groups`) is one number for each group. Two partitions of an axis
therefore give two different means, and neither is the mean over the whole axis.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

# An axis of x, given by its number, a mapped axis, given by its name, or a GroupedAxis.
Axis = Any


@dataclasses.dataclass(frozen=True)
class GroupedAxis:
    """Mapped axes whose indices are in groups of equal size.

    Attributes:
        names: the axes, in the order in which the groups count their indices.
        groups: each index once, in ascending order; the first indices of the groups ascend as well.
    """

    names: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]


def summed_axes(params: Mapping[str, Any], axis_sizes: Mapping[Any, int]) -> list[Axis] | None:
    """The mapped axes over which a psum with these parameters sums; None if no mean knows them."""
    names = names_of(params)
    if any(name not in axis_sizes for name in names) or why_not(params, axis_sizes):
        return None
    if (groups := params.get("axis_index_groups")) is None:
        return names
    groups = tuple(sorted(tuple(sorted(map(int, group))) for group in groups))
    if len(groups) == 1:
        return names
    if len(groups[0]) == 1:
        return []
    return [GroupedAxis(tuple(names), groups)]


def names_of(params: Mapping[str, Any]) -> list[Any]:
    return [axis for axis in params["axes"] if not isinstance(axis, int | np.integer)]


def dims_of(params: Mapping[str, Any]) -> list[int]:
    """The axes of the operand over which a sum is taken."""
    return [int(axis) for axis in params["axes"] if isinstance(axis, int | np.integer)]


def why_not(params: Mapping[str, Any], axis_sizes: Mapping[Any, int]) -> str:
    """Why the groups of a psum cannot be those of an operator; empty if they can, or are absent."""
    groups = params.get("axis_index_groups")
    if groups is None:
        return ""
    if len({len(group) for group in groups}) > 1:
        return (
            "the groups of axis_index_groups differ in size, and lax.pmean divides by the size of"
            " the first; jax_bnar's operators count each group, so call one with axis_name= and"
            " axis_index_groups="
        )
    indices = sorted(index for group in groups for index in group)
    if indices != list(range(math.prod(axis_sizes.get(name, 0) for name in names_of(params)))):
        return "axis_index_groups does not hold each index of the axis exactly once"
    return ""


def size_of(axis: Axis, axis_sizes: Mapping[Any, int]) -> int:
    """The number of indices along a mapped axis that one mean is taken over."""
    return len(axis.groups[0]) if isinstance(axis, GroupedAxis) else axis_sizes[axis]


def flat(over: Iterable[Axis]) -> frozenset[Axis]:
    """The axes without their groups."""
    return frozenset(
        name for axis in over for name in (axis.names if isinstance(axis, GroupedAxis) else (axis,))
    )


def of_both(first: Collection[Axis], second: Collection[Axis]) -> frozenset[Axis] | None:
    """The axes over which the mean of a mean is taken; None if it is no mean over axes.

    Groups have the same size, so the mean of their means over the whole axis is the mean over it.
    """
    both = {*first, *second}
    whole = {axis for axis in both if not isinstance(axis, GroupedAxis)}
    grouped = [axis for axis in both - whole if not whole.issuperset(axis.names)]
    names = [name for axis in grouped for name in axis.names]
    if len(set(names)) < len(names) or whole.intersection(names):
        return None
    return frozenset([*whole, *grouped])
