"""The inference form in plain `jax.numpy`, in the user's layout, as XLA fuses them best.

This module is internal and may change without notice. Outside CPUs, evaluation runs these functions
instead of a kernel (`jax_bnar._platform_primitives.Inference`), unless an implementation is asked
for: XLA computes them in the loop, or in the convolution, that comes before or after. They do not
reshape x, so that XLA sees the convolution. On CPUs they compute what is folded into convolutions
(`jax_bnar._fold.inlined`), and a backward that no kernel has.

Arguments are those of the operation `normalise`, for any number of inputs. Statistics that are None
stand for a mean of 0 and a deviation of 1, which is what remains of a BatchNorm that was folded
into a convolution.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp

from jax_bnar._base.activations import Activation, activate
from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._base.gates import Gate, recomputes
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._base.layout import ChannelLayout
from jax_bnar.reference import gated, multiplier, times_derivative, widened

# With this epsilon and the variance below, 1/sqrt(var + epsilon) is exactly 1 in every accumulation
# dtype, so normalising with mean 0 changes nothing.
NEUTRAL_EPSILON: Final = 2.0**-17


def given_or_neutral(
    x: tuple[jax.Array, ...], statistics: tuple[Statistics, ...], layout: ChannelLayout
) -> tuple[Statistics, ...]:
    """The statistics, with those that None stands for if epsilon is `NEUTRAL_EPSILON`."""
    return tuple(
        _neutral_for(own_x, layout) if own.mean is None else own
        for own_x, own in zip(x, statistics, strict=True)
    )


def _neutral_for(x: jax.Array, layout: ChannelLayout) -> Statistics:
    shape = (*[1] * layout.leading, 1, x.shape[layout.channel_axis()])
    zeros = jnp.zeros(shape, accumulation_dtype(x.dtype))
    return neutral_statistics(Statistics(zeros, zeros))


def neutral_statistics(like: Statistics) -> Statistics:
    """A mean of 0 and a deviation of 1, if epsilon is `NEUTRAL_EPSILON`."""
    return Statistics(jnp.zeros_like(like.var), jnp.full_like(like.var, 1 - NEUTRAL_EPSILON))


def inference(
    x: tuple[jax.Array, ...],
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    statistics: tuple[Statistics, ...],
    *,
    layout: ChannelLayout,
    epsilon: float,
    activation: Activation = "relu",
    negative_slope: float = 0.0,
    out_dtype: Any = None,
) -> jax.Array:
    """y in the dtype `out_dtype`, or that of x.

    Several inputs are added in the accumulation dtype, and z in the dtype of y, as in Flax. XLA for
    GPUs makes `relu(conv + bias + z)` one call of cuDNN, but not if its parts are converted in
    between. And where a residual is converted to float32, XLA also stores it in float32, beside the
    16-bit array that the next convolution reads.
    """
    dtype = out_dtype or x[0].dtype
    y = functools.reduce(
        jnp.add,
        (
            _normalised(*own, layout=layout, epsilon=epsilon, dtype=dtype)
            for own in zip(x, affine, statistics, strict=True)
        ),
    )
    y = y if z is None else y.astype(dtype) + z
    return activate(y, activation, negative_slope).astype(dtype)


def backward(
    dy: jax.Array,
    x: tuple[jax.Array, ...],
    saved: jax.Array | None,
    statistics: tuple[Statistics, ...],
    affine: tuple[Affine, ...],
    *,
    layout: ChannelLayout,
    epsilon: float,
    gate: Gate,
    has_z: bool = False,
    activation: Activation = "relu",
    negative_slope: float = 0.0,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """dx = scale*rstd*e of each input, and dz = e if there is a residual.

    The arguments are those of the operation `backward_reduce`, with var and scale for every gate.
    """
    of_activation = {"activation": activation, "negative_slope": negative_slope}
    if recomputes(gate):
        u = functools.reduce(
            jnp.add,
            (
                _normalised(*own, layout=layout, epsilon=epsilon, dtype=dy.dtype)
                for own in zip(x, affine, statistics, strict=True)
            ),
        )
        if gate == "z":
            assert saved is not None
            u = u + widened(saved)
        e = times_derivative(dy, u, **of_activation)
    else:
        e = widened(gated(dy, (), saved, None, None, gate, dtype=dy.dtype, **of_activation))
    dx = (
        (layout.per_element(multiplier(of_input.var, own.scale, epsilon), e) * e).astype(to.dtype)
        for to, own, of_input in zip(x, affine, statistics, strict=True)
    )
    return tuple(dx), e.astype(dy.dtype) if has_z else None


def _normalised(
    x: jax.Array,
    affine: Affine,
    statistics: Statistics,
    *,
    layout: ChannelLayout,
    epsilon: float,
    dtype: Any,
) -> jax.Array:
    scale, bias = affine
    mean, var = statistics
    if mean is None:
        assert scale is None
        x = x.astype(dtype)
        return x if bias is None else x + layout.per_element(bias.astype(x.dtype), x)
    a = layout.per_element(multiplier(var, scale, epsilon), x)
    y = (widened(x) - layout.per_element(mean, x)) * a
    return y if bias is None else y + layout.per_element(bias, x)
