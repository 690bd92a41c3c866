"""More channels for arrays of few rows and many channels, of which vectors leave a rest.

The kernels for CPUs take whole vectors of 16 elements. Where a row is no multiple of that, they
join up to 16 rows to one (`CutRows` in cpu/plan.cc), with a mean, a factor and sums for each of its
columns: as much memory as 16 rows have, several times. Of many rows that is little. Of a few it is
more than the array: a step of 17 x 8191 float32 took 3.3 ms, and 0.6 ms with copies of 8192
channels. Calls with a mask run as they are, because the order of its bits is that of the elements.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from jax_bnar._base.canonical import CanonicalShape

_LANES: Final = 16
# From as many elements on, a row of joined rows takes longer than copies of its rows.
_LEAST_COLUMNS: Final = 2048
# Of as many joined rows, their vectors are a small part.
_MANY_ROWS: Final = 8


def padded_channels(shape: CanonicalShape, kinds: Sequence[str]) -> int | None:
    """How many channels a call on arrays of these kinds should have, or None for as many as now."""
    if "mask" in kinds or not all(isinstance(size, int) for size in shape):
        return None
    _, rows, channels, inner = shape
    width = channels * inner
    joined = _LANES // math.gcd(width, _LANES)
    # The kernels take longer runs of one channel (inner) as they are.
    if inner >= _LANES or joined * width < _LEAST_COLUMNS or rows > _MANY_ROWS * joined:
        return None
    return -(-channels // _LANES) * _LANES if joined > 1 else None


def with_channels(array: jax.Array, channels: int) -> jax.Array:
    """A tensor or a vector with zeros as further channels."""
    axis = _channel_axis(array)
    more = [(0, 0)] * array.ndim
    more[axis] = (0, channels - array.shape[axis])
    return jnp.pad(array, more)


def without_channels(array: jax.Array, channels: int) -> jax.Array:
    """The first channels of a tensor or a vector."""
    return jax.lax.slice_in_dim(array, 0, channels, axis=_channel_axis(array))


def _channel_axis(array: Any) -> int:
    """That of (G, N, C, S), or of (G, C)."""
    return array.ndim // 2
