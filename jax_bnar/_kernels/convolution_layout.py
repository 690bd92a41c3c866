"""In which order XLA has the results of convolutions in the memory of an NVIDIA GPU.

XLA chooses the layout of a convolution by dtype, number of axes and device, whatever the order of
the axes in the program: channels that come last there may lie before the pixels of each picture,
and the other way round. Its own operations follow that. A custom call gets the order that it asks
for, and if that is another one, XLA transposes whole arrays before and after the call. As compiled
for an A100, the training step of ResNet-50 in float32 moved 1.30 times the bytes of plain Flax so,
and moves 0.60 times as many where our calls ask for the order of the convolutions.

The rule is that of XLA's GPU layout assignment: `tests/kernels/test_gpu_compiled_facts.py` compares
it with what XLA compiles.
"""

import dataclasses
import math
import os
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jax_bnar._base import jax_compat
from jax_bnar._base.canonical import CanonicalShape
from jax_bnar._base.implementation import Computation
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._kernels.producers import convolution_before
from jax_bnar.reference import pack_mask, unpack_mask

# Those for which XLA does this, and which have kernels.
PLATFORMS: Final = ("cuda",)
_HOPPER: Final = (9, 0)


def puts_channels_first(
    capability: tuple[int, int] | None, dtype: Any, spatial_axes: int
) -> bool | None:
    """Whether XLA has the channels of a convolution before its spatial axes.

    Args:
        capability: the compute capability of the GPU, (9, 0) for 9.0. Without one, the answer is
            None where it depends on it.
        dtype: that of the convolution.
        spatial_axes: their number.
    """
    if spatial_axes > 2 or jnp.dtype(dtype).itemsize == 8:
        return True
    is_narrow = jnp.dtype(dtype).itemsize == 2
    if spatial_axes == 2 and is_narrow:
        return False
    return None if capability is None else capability < _HOPPER


def in_program(
    ctx: Any, layout: ChannelLayout, x: Any, aval: jax.core.ShapedArray
) -> ChannelLayout:
    """The layout of x, with what is expected of the program that is being lowered.

    JAX lowers the bodies of `shard_map`, `jax.checkpoint`, loops and branches apart, and what a
    `custom_jvp` contains apart from these. So a forward that nobody differentiates, and that is not
    synchronised over a named axis, sees no convolution in such a body, but those before it.

    Args:
        ctx: the context of the lowering.
        layout: that of x in the program.
        x: the array in the program.
        aval: its shape and dtype.
    """
    spatial = layout.spatial_sizes(aval.shape)
    if set(PLATFORMS).isdisjoint(ctx.module_context.platforms) or math.prod(spatial) < 2:
        return layout
    # With a flag that forces a layout, somebody compares layouts: calls keep that of the program.
    if "xla_gpu_force_conv_" in os.environ.get("XLA_FLAGS", ""):
        return layout
    capability = jax_compat.gpu_capability_of_program(ctx)
    is_last = layout.has_channels_last(aval.shape)
    if puts_channels_first(capability, aval.dtype, len(spatial)) != is_last:
        return layout
    found = convolution_before(ctx, x)
    if found is None or found.dtype is None:
        return layout
    if (found.axes, found.channel_axis) != (len(spatial) + 2, layout.axis):
        return layout
    swapped = puts_channels_first(capability, found.dtype, len(spatial)) == is_last
    return dataclasses.replace(layout, swapped_on_cuda=swapped)


def is_for_gpus_alone(ctx: Any) -> bool:
    """Whether a program is lowered for `PLATFORMS` and for no other."""
    return tuple(ctx.module_context.platforms) == PLATFORMS


def pure_jax(ctx: Any) -> Computation:
    """How pure JAX computes an operation in the program that is being lowered.

    XLA likes to sum along the axis that comes last in memory. In a program with custom calls, it
    stored transposed copies of whole arrays in float32 for that: behind one of our calls and a
    convolution, a norm in pure JAX moved 27 arrays, and 15 where their order is `pinned`.
    """
    # What jax.export promises to keep stable has no layouts.
    is_pinned = is_for_gpus_alone(ctx) and not jax_compat.is_for_export(ctx)
    return "pinned" if is_pinned else "xla"


def pinned(tensor: jax.Array) -> jax.Array:
    """A canonical tensor, in its own order in memory."""
    return with_layout_constraint(tensor, Layout(tuple(range(tensor.ndim))))


class Swapped:
    """Between canonical arrays of pictures of S pixels in two orders: the program's and the other.

    One is (G, N*S, C, 1), and the other (G, N, C, S). XLA reorders the bits of a mask, which are
    few bytes: that takes less than transposing the tensors would.
    """

    def __init__(self, x: CanonicalShape, pixels: int) -> None:
        pictures = x.rows * x.inner // pixels
        self._program = x
        if x.inner == 1:
            self._call = CanonicalShape(x.groups, pictures, x.channels, pixels)
            self._axes = x.groups, pictures, pixels, x.channels
        else:
            self._call = CanonicalShape(x.groups, pictures * pixels, x.channels, 1)
            self._axes = x.groups, pictures, x.channels, pixels

    def apply(self, array: jax.Array, kind: OperandKind) -> jax.Array:
        """A tensor or a mask in the other order; a vector stays as it is."""
        if kind == "mask":
            bits = unpack_mask(array, jax.ShapeDtypeStruct(self._program, bool))
            return pack_mask(self.apply(bits, "tensor"))
        if kind == "tensor":
            return array.reshape(self._axes).swapaxes(2, 3).reshape(self._call)
        return array

    def undo(self, array: jax.Array, kind: OperandKind) -> jax.Array:
        """The inverse of `apply`."""
        if kind == "mask":
            bits = unpack_mask(array, jax.ShapeDtypeStruct(self._call, bool))
            return pack_mask(self.undo(bits, "tensor"))
        if kind == "tensor":
            groups, pictures, *pair = self._axes
            return (
                array.reshape(groups, pictures, *pair[::-1]).swapaxes(2, 3).reshape(self._program)
            )
        return array
