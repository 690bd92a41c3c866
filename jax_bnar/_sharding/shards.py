"""How an array in the user's layout is divided over a mesh, derived from its sharding."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._sharding.collectives import Vectors, sum_packed

# The mesh axes that shard one array axis, major axis first.
Axes = tuple[str, ...]


def axes_of(spec: Sequence[Any], ndim: int) -> list[Axes]:
    """A partition spec as one tuple of mesh axes per array axis."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [() if e is None else tuple(e) if isinstance(e, tuple) else (e,) for e in entries]


def spec_of(axes: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in axes))


@dataclasses.dataclass(frozen=True)
class Shards:
    """The sharding of x, and the shardings and shapes that follow from it.

    Attributes:
        layout: the layout of the whole array.
        shape: the shape of the whole x.
        sizes: the sizes of the mesh axes.
        axes: the mesh axes that shard each axis of x.
    """

    layout: ChannelLayout
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    axes: tuple[Axes, ...]

    @classmethod
    def create(
        cls,
        layout: ChannelLayout,
        shape: tuple[int, ...],
        spec: Sequence[Any],
        sizes: Mapping[str, int],
        *,
        has_mask: bool,
    ) -> "Shards":
        """The sharding that the operation uses: the given one as far as possible.

        An axis is left unsharded if it would not divide evenly, because XLA would pad it and the
        padding would count in the statistics, or if a shard would not hold whole bytes of the mask.
        """
        axes = axes_of(spec, len(shape))
        number = functools.partial(_number, sizes)
        axes = [a if size % number(a) == 0 else () for a, size in zip(axes, shape, strict=True)]
        if has_mask:
            split = layout.mask_split(shape)
            first = layout.leading if split is None else split
            fits = split is None or math.prod(shape[first:]) // number(axes[first]) % 8 == 0
            if first == layout.leading and (split is None or layout.num_groups > 1):
                fits = fits and _groups_are_whole(layout, number(axes[first]))
            axes = axes[: first + fits] + [()] * (len(shape) - first - fits)
        return cls(layout, shape, sizes, tuple(axes))

    @property
    def row_axes(self) -> Axes:
        """The mesh axes of the axis that ghost batches split."""
        return self.axes[self.layout.leading]

    @property
    def groups_are_whole(self) -> bool:
        return _groups_are_whole(self.layout, _number(self.sizes, self.row_axes))

    @property
    def spanning(self) -> Axes:
        """The mesh axes over which statistics are merged; empty if no group spans devices."""
        body = range(self.layout.leading, len(self.shape))
        reduced = [i for i in body if i != self.layout.channel_axis()]
        if self.layout.num_groups > 1 and self.groups_are_whole:
            reduced.remove(self.layout.leading)
        return tuple(a for i in reduced for a in self.axes[i])

    def spec(self, kind: OperandKind, shape: tuple[int, ...]) -> PartitionSpec:
        """The sharding of an operand of this kind and (whole) shape."""
        if kind == "tensor":
            return spec_of(self.axes)
        leading, channel = self.layout.leading, self.layout.channel_axis()
        groups = self.row_axes if self.layout.num_groups > 1 and self.groups_are_whole else ()
        if kind == "vector":
            before = zip([*self.axes[:leading], groups], shape[:-1], strict=True)
            # A single channel may lie on a mesh axis of one device, and vectors keep that.
            return spec_of([*(a if n > 1 else () for a, n in before), self.axes[channel]])
        split = self.layout.mask_split(self.shape)
        if split is None:
            return spec_of([*self.axes[:leading], groups, ()])
        return spec_of(self.axes[: split + 1])

    def local_shape(self) -> tuple[int, ...]:
        return tuple(
            size // _number(self.sizes, a) for size, a in zip(self.shape, self.axes, strict=True)
        )

    def local_layout(self) -> ChannelLayout:
        """The layout of one device's shard, whose groups are the parts of groups that it holds."""
        rows, part = self.local_shape()[self.layout.leading], self.part_rows()
        groups = rows // part if self.layout.num_groups > 1 else 1
        return dataclasses.replace(self.layout, num_groups=groups)

    def part_rows(self) -> int:
        """Rows of one part: the largest equal pieces of a shard that each lie within one group."""
        rows = self.local_shape()[self.layout.leading]
        return math.gcd(rows, self.shape[self.layout.leading] // self.layout.num_groups)

    def span(self) -> "MeshSpan | None":
        """The span that merges statistics, or None if no group spans devices."""
        if not self.spanning:
            return None
        return MeshSpan(self)


class MeshSpan:
    """Groups spread over the axes of a mesh, inside the partitioned program of one device.

    If ghost batches span devices, a device holds parts of only some groups. It adds each part into
    the slot of its group, and the single all-reduce has a slot for every group.
    """

    shares_scale = True  # No vector is sharded over the axes that a group spans.

    def __init__(self, shards: Shards) -> None:
        local = shards.local_layout()
        of_group = shards.layout.group_elements(shards.shape)
        self.parts = of_group // local.group_elements(shards.local_shape())
        self._shards = shards
        self._slots = shards.layout.num_groups > 1 and not shards.groups_are_whole

    def _group_of_part(self) -> jax.Array:
        """The index of the group that each part on this device belongs to."""
        shards = self._shards
        rows = shards.local_shape()[shards.layout.leading]
        group_rows = shards.shape[shards.layout.leading] // shards.layout.num_groups
        first = jax.lax.axis_index(shards.row_axes).astype(np.int32) * np.int32(rows)
        offsets = jnp.arange(0, rows, shards.part_rows(), dtype=np.int32)
        return (first + offsets) // np.int32(group_rows)

    def sum(self, array: jax.Array) -> jax.Array:
        if self._slots:
            groups = self._shards.layout.num_groups
            slots = jnp.zeros((*array.shape[:-2], groups, array.shape[-1]), array.dtype)
            array = slots.at[..., self._group_of_part(), :].add(array)
        return jax.lax.psum(array, self._shards.spanning)

    def select(self, vector: jax.Array) -> jax.Array:
        if self._slots and vector.shape[-2] > 1:
            return jnp.take(vector, self._group_of_part(), axis=-2)
        return vector

    def sum_backward(self, sums: Vectors, cotangents: Vectors) -> tuple[Vectors, Vectors]:
        return tuple(sum_packed(self, *sums)), cotangents


def _groups_are_whole(layout: ChannelLayout, shards: int) -> bool:
    return layout.num_groups % shards == 0


def _number(sizes: Mapping[str, int], axes: Axes) -> int:
    return math.prod(sizes[a] for a in axes)
