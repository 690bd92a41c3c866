"""How an array in the user's layout maps to (G, N, C, S) while keeping its own axes.

The kernels support only the canonical shape. Sharding belongs to the axes of the user's array, and
a reshape would lose it (for example rows N*H*W with H sharded). So the operations of
`jax_bnar.primitive` keep the user's axes and carry a `ChannelLayout`, and each device reshapes its
own shard.

Operand shapes, where `lead` stands for the axes that vmap added:

    tensor (x, z, y, dy, ...)   (*lead, D0, ..., Dk), with the channels on axis len(lead) + axis
    vector (scale, mean, ...)   (*lead, num_groups, C); every axis before C may also have size 1
    mask                        one bit per element of x, see `ChannelLayout.mask_shape`
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar._base.canonical import CanonicalShape, mask_bytes
from jax_bnar._base.signatures import OperandKind


@dataclasses.dataclass(frozen=True)
class ChannelLayout:
    """Which axes of an array hold its channels and its statistics groups.

    Attributes:
        axis: the channel axis, counted from the first axis after the leading ones.
        num_groups: the number of groups into which the first axis after the leading ones splits.
        leading: the number of leading axes (added by vmap). Each of their indices has separate
            statistics.
        swapped_on_cuda: whether XLA is expected to have the channels and the spatial axes in the
            other order in the memory of an NVIDIA GPU (`jax_bnar._kernels.convolution_layout`).
    """

    axis: int
    num_groups: int = 1
    leading: int = 0
    swapped_on_cuda: bool = False

    def canonical(self, shape: tuple[int, ...]) -> CanonicalShape:
        body, axis = shape[self.leading :], self.axis
        return CanonicalShape(
            groups=math.prod(shape[: self.leading]) * self.num_groups,
            rows=math.prod(body[:axis]) // self.num_groups,
            channels=body[axis],
            inner=math.prod(body[axis + 1 :]),
        )

    def group_elements(self, shape: tuple[int, ...]) -> int:
        """The number of elements per channel in one statistics group of an array of this shape."""
        return math.prod(self.group_sizes(shape))

    def group_sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The two factors of that number."""
        _, rows, _, inner = self.canonical(shape)
        return rows, inner

    def channel_axis(self) -> int:
        return self.leading + self.axis

    def vector_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.leading], self.num_groups, shape[self.channel_axis()])

    def per_element(self, vector: jax.Array, x: jax.Array) -> jax.Array:
        """A vector, broadcast to x, whose axes stay as they are (for strict rank promotion).

        Its groups are repeated along the axis of the batch. Splitting that axis by a reshape would
        make XLA gather an x that is sharded there.
        """
        shape = [*vector.shape[: self.leading], *[1] * (x.ndim - self.leading)]
        shape[self.channel_axis()] = vector.shape[-1]
        if vector.shape[-2] > 1:
            vector = jnp.repeat(vector, x.shape[self.leading] // self.num_groups, axis=-2)
            shape[self.leading] = x.shape[self.leading]
        return jnp.broadcast_to(vector.reshape(shape), x.shape)

    def spatial_sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the axes beside the batch and the channels, which are first or last of them.

        It is () if the channels are between them, and for symbolic sizes (jax.export).
        """
        _, *others = shape[self.leading :]
        del others[self.axis - 1]
        is_known = all(isinstance(size, int) for size in others)
        return tuple(others) if is_known and self.axis in (1, len(others) + 1) else ()

    def has_channels_last(self, shape: tuple[int, ...]) -> bool:
        return self.channel_axis() == len(shape) - 1

    def mask_split(self, shape: tuple[int, ...]) -> int | None:
        """The axis of x from which on the mask's bits are packed, or None if no axis fits.

        The kernel packs the bits of a statistics group in row-major order. The axes before the
        split remain axes of the mask, so the mask is sharded like x, and its bits mean the same on
        any number of devices.
        """
        _, *group = self.canonical(shape)
        if not isinstance(math.prod(group), int) or math.prod(group) % 8:
            return None
        tail = 1
        for split in range(len(shape) - 1, self.leading, -1):
            tail *= shape[split]
            if tail % 8 == 0:
                return split
        return self.leading

    def mask_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        split = self.mask_split(shape)
        if split is None:
            _, *group = self.canonical(shape)
            return (*shape[: self.leading], self.num_groups, mask_bytes(*group))
        return (*shape[:split], math.prod(shape[split:]) // 8)

    def shapes_of(
        self, kinds: Iterable[OperandKind], shape: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        """The shapes of arrays of these kinds for an x of the given shape."""
        of_kind = {
            "tensor": lambda: shape,
            "vector": lambda: self.vector_shape(shape),
            "mask": lambda: self.mask_shape(shape),
        }
        return [of_kind[kind]() for kind in kinds]

    def to_canonical(
        self,
        arrays: Iterable[jax.Array | None],
        kinds: Iterable[OperandKind],
        shape: tuple[int, ...],
    ) -> list[Any]:
        """Operands in canonical shape. `shape` is that of x, and None stays None."""
        return [
            None if array is None else self._to_canonical(array, kind, shape)
            for array, kind in zip(arrays, kinds, strict=True)
        ]

    def from_canonical(
        self, arrays: Iterable[jax.Array], kinds: Iterable[OperandKind], shape: tuple[int, ...]
    ) -> tuple[jax.Array, ...]:
        """Results of the kernels, reshaped to the user's layout."""
        return tuple(
            self._from_canonical(array, kind, shape)
            for array, kind in zip(arrays, kinds, strict=True)
        )

    def _to_canonical(
        self, array: jax.Array, kind: OperandKind, shape: tuple[int, ...]
    ) -> jax.Array:
        canonical = self.canonical(shape)
        if kind == "tensor":
            return array.reshape(canonical)
        if kind == "mask":
            if self._has_canonical_mask(shape):
                return array
            return array.reshape(canonical.groups, mask_bytes(*canonical[1:]))
        if all(isinstance(size, int) and size == 1 for size in array.shape[:-1]):
            return array.reshape(1, array.shape[-1])
        array = jnp.broadcast_to(array, (*shape[: self.leading], self.num_groups, array.shape[-1]))
        return array.reshape(canonical.groups, canonical.channels)

    def _from_canonical(
        self, array: jax.Array, kind: OperandKind, shape: tuple[int, ...]
    ) -> jax.Array:
        if kind == "mask" and self._has_canonical_mask(shape):
            return array
        (own,) = self.shapes_of([kind], shape)
        return array.reshape(own)

    def _has_canonical_mask(self, shape: tuple[int, ...]) -> bool:
        # The general reshape would fail for a symbolic shape: XLA evaluates the byte count in two
        # different ways.
        return self.leading == 0 and self.mask_split(shape) is None
