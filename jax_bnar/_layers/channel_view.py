"""Maps the feature axes of a layer to the single channel axis that the operators support."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._operators.validation import check_integer
from jax_bnar._sharding.alignment import merge_axes, split_axis


class ChannelView(NamedTuple):
    """A view of an array with any number of feature axes as one with a single channel axis.

    Adjacent feature axes are merged in place, which moves no data; others are transposed to the
    end. If there is no axis to reduce over, the view gets one of length 1.

    Attributes:
        features: the sizes of the feature axes.
        permutation: the axes in the order in which they are merged.
        start: where the feature axes begin then.
        has_reduced: whether there is an axis to reduce over.
    """

    features: tuple[int, ...]
    permutation: tuple[int, ...]
    start: int
    has_reduced: bool

    @property
    def axis(self) -> int:
        """The channel axis of the view."""
        return self.start if self.has_reduced else 1

    @property
    def _stop(self) -> int:
        return self.start + len(self.features)

    def view(self, array: jax.Array) -> jax.Array:
        return self._merged(array.transpose(self.permutation))

    def _merged(self, permuted: jax.Array) -> jax.Array:
        merged = merge_axes(permuted, self.start, self._stop)
        return merged if self.has_reduced else merged[None]

    def view_mask(self, mask: jax.Array) -> jax.Array:
        """The same for an array whose axes may have length 1 where those of x have not.

        They stay as they are, except for a feature axis that is merged with a longer one.
        """
        mask = mask.transpose(self.permutation)
        before, after = mask.shape[: self.start], mask.shape[self._stop :]
        if any(size > 1 for size in mask.shape[self.start : self._stop]):
            mask = jnp.broadcast_to(mask, (*before, *self.features, *after))
        return self._merged(mask)

    def restore(self, array: jax.Array, like: jax.Array) -> jax.Array:
        """An array of the view as one of the shape of `like`, and sharded like it."""
        array = array if self.has_reduced else array[0]
        mesh, spec = jax.typeof(like).sharding.mesh, jax.typeof(like).sharding.spec
        entries = tuple(spec[axis] for axis in self.permutation[self.start : self._stop])
        inverse = tuple(int(i) for i in np.argsort(self.permutation))
        return split_axis(array, self.start, self.features, mesh, entries).transpose(inverse)


def feature_axes(axis: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The feature axes as sorted non-negative integers without duplicates.

    Raises:
        TypeError: an axis is not an integer.
        ValueError: an axis is out of range.
    """
    ndim = len(shape)
    axes = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    kind = "an integer or a sequence of integers"
    axes = tuple(check_integer("BatchNorm", "axis", a, kind) for a in axes)
    if not all(-ndim <= a < ndim for a in axes):
        raise ValueError(
            f"BatchNorm: axis must lie in [{-ndim}, {ndim}) for x of shape {shape}, got {axis!r}."
        )
    return tuple(sorted({a % ndim for a in axes}))


def channel_view(axis: Any, shape: tuple[int, ...]) -> ChannelView:
    """The view of an array of this shape with the feature axes `axis`."""
    features = feature_axes(axis, shape)
    reduced = tuple(a for a in range(len(shape)) if a not in features)
    if features and features == tuple(range(features[0], features[-1] + 1)):
        permutation, start = tuple(range(len(shape))), features[0]
    else:
        permutation, start = reduced + features, len(reduced)
    return ChannelView(
        features=tuple(shape[a] for a in features),
        permutation=permutation,
        start=start,
        has_reduced=bool(reduced),
    )
