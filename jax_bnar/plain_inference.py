"""The inference forms in plain `jax.numpy`, in the user's layout, as XLA fuses them best.

This module is internal and may change without notice. Outside CPUs, evaluation runs these functions
instead of a kernel (`jax_bnar.primitive.Inference`): XLA computes them in the loop, or in the
convolution, that comes before or after. They do not reshape x, so that XLA sees the convolution.

Operands are those of the primitives `normalise` and `dual_normalise`. Statistics that are None
stand for a mean of 0 and a deviation of 1, which is what remains of a BatchNorm that was folded
into a convolution.
"""

from typing import Final

import jax
import jax.numpy as jnp

from jax_bnar._base.config import Activation
from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._base.layout import ChannelLayout
from jax_bnar.reference import multiplier, widened

# With this epsilon and the variance below, 1/sqrt(var + epsilon) is exactly 1 in every accumulation
# dtype, so normalising with mean 0 changes nothing.
NEUTRAL_EPSILON: Final = 2.0**-17


def neutral_statistics(x: jax.Array, layout: ChannelLayout) -> tuple[jax.Array, jax.Array]:
    """The mean and var that None stands for, if epsilon is `NEUTRAL_EPSILON`."""
    shape = (*[1] * layout.leading, 1, x.shape[layout.channel_axis()])
    dtype = accumulation_dtype(x.dtype)
    return jnp.zeros(shape, dtype), jnp.full(shape, 1 - NEUTRAL_EPSILON, dtype)


def inference(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array | None,
    var: jax.Array | None,
    *,
    layout: ChannelLayout,
    epsilon: float,
    activation: Activation,
) -> jax.Array:
    """y in the dtype of x.

    Arrays are added in the dtype of x, as in Flax. XLA for GPUs makes `relu(conv + bias + z)` one
    call of cuDNN, but not if its parts are converted in between. And where a residual is converted
    to float32, XLA also stores it in float32, beside the 16-bit array that the next convolution
    reads.
    """
    if mean is None or var is None:
        assert scale is None
        y = x if bias is None else x + _per_element(bias.astype(x.dtype), x, layout)
        y = y if z is None else y + z
    else:
        y = _normalised(x, scale, bias, mean, var, layout, epsilon)
        y = y if z is None else y.astype(x.dtype) + z
    return (jax.nn.relu(y) if activation == "relu" else y).astype(x.dtype)


def dual_inference(
    x1: jax.Array,
    x2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    *,
    layout: ChannelLayout,
    epsilon: float,
) -> jax.Array:
    """relu(batch_norm(x1) + batch_norm(x2)) in the dtype of x1, rounded once."""
    first = _normalised(x1, scale1, bias1, mean1, var1, layout, epsilon)
    second = _normalised(x2, scale2, bias2, mean2, var2, layout, epsilon)
    return jax.nn.relu(first + second).astype(x1.dtype)


def _normalised(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    layout: ChannelLayout,
    epsilon: float,
) -> jax.Array:
    a = _per_element(multiplier(var, scale, epsilon), x, layout)
    y = (widened(x) - _per_element(mean, x, layout)) * a
    return y if bias is None else y + _per_element(bias, x, layout)


def _per_element(vector: jax.Array, x: jax.Array, layout: ChannelLayout) -> jax.Array:
    """A vector of shape (*lead, 1, C), broadcast to x explicitly (for strict rank promotion)."""
    shape = [*vector.shape[: layout.leading], *[1] * (x.ndim - layout.leading)]
    shape[layout.channel_axis()] = vector.shape[-1]
    return jnp.broadcast_to(vector.reshape(shape), x.shape)
