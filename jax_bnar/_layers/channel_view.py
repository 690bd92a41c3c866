"""Maps the feature axes of a layer to the single channel axis that the operators support."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._operators.validation import check_integer


class ChannelView(NamedTuple):
    """A view of an array with any number of feature axes as one with a single channel axis.

    Adjacent feature axes are merged in place, which moves no data; others are transposed to the
    end. If there is no axis to reduce over, the view gets one of length 1.
    """

    features: tuple[int, ...]
    permutation: tuple[int, ...]
    permuted_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int

    def view(self, array: jax.Array) -> jax.Array:
        return array.transpose(self.permutation).reshape(self.shape)

    def view_mask(self, mask: jax.Array) -> jax.Array:
        """The same for an array whose axes may have length 1 where those of x have not.

        They stay as they are, except for a feature axis that is merged with a longer one.
        """
        mask = mask.transpose(self.permutation)
        start = self.axis if len(self.features) < mask.ndim else 0
        end = start + len(self.features)
        before, own, after = mask.shape[:start], mask.shape[start:end], mask.shape[end:]
        if any(size > 1 for size in own):
            own = self.features
            mask = jnp.broadcast_to(mask, (*before, *own, *after))
        # Without an axis before the channels, there is one of length 1 if the view has one.
        return mask.reshape(*(before or (1,) * self.axis), math.prod(own), *after)

    def restore(self, array: jax.Array) -> jax.Array:
        inverse = tuple(int(i) for i in np.argsort(self.permutation))
        return array.reshape(self.permuted_shape).transpose(inverse)


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
    channels = math.prod(shape[a] for a in features)
    if features and features == tuple(range(features[0], features[-1] + 1)):
        permutation = tuple(range(len(shape)))
        before, after = shape[: features[0]], shape[features[-1] + 1 :]
    else:
        permutation = reduced + features
        before, after = tuple(shape[a] for a in reduced), ()
    if not reduced:
        before = (1,)
    return ChannelView(
        features=tuple(shape[a] for a in features),
        permutation=permutation,
        permuted_shape=tuple(shape[a] for a in permutation),
        shape=(*before, channels, *after),
        axis=len(before),
    )
