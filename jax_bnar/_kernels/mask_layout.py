"""How a mask lies in memory where a kernel reads or writes it.

The bits of a mask are in the order of the elements, for everyone but the CUDA kernels. A team of
CUDA blocks works on a slab of a few channels at a time: in that order, it would write a few bytes
of each row, but memory moves 32 at a time. So a custom call may ask for an array of the same bytes
with axes for rows and channels, in a layout in which the rows of a few channels are neighbours.

The layout is a matter between the call and XLA. A mask that goes from forward to backward in one
program stays as it is; wherever somebody else reads it (pure JAX, a caller, a device with another
sharding), XLA copies it into the order of the elements.
"""

from typing import Any, NamedTuple

from jax_bnar._base.canonical import CanonicalShape, mask_bytes
from jax_bnar._kernels import targets


class MaskLayout(NamedTuple):
    """A mask as an operand or a result of a custom call.

    Attributes:
        shape: (G, bytes), or (G, N, C / channels, channels / 8) where the bits of so many
            neighbouring channels of a row lie together.
        major_to_minor: the order of these axes in memory.
    """

    shape: tuple[Any, ...]
    major_to_minor: tuple[int, ...]


def mask_layout(platform: str, canonical: CanonicalShape) -> MaskLayout:
    """That of the mask of an array of this shape, whose sizes may be symbols (jax.export)."""
    groups, rows, channels, inner = canonical
    together = targets.mask_channels(platform, canonical)
    if together == 0:
        return MaskLayout((groups, mask_bytes(rows, channels, inner)), (0, 1))
    return MaskLayout((groups, rows, channels // together, together // 8), (0, 2, 1, 3))
