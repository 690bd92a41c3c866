"""Folding a BatchNorm with fixed statistics into the convolution before it, and what remains."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._layers.activation import layer_activation
from jax_bnar._layers.promotion import promoted
from jax_bnar._operators.folded import bias_act


class Folded(NamedTuple):
    """The kernel and bias of a convolution that replaces a convolution and a BatchNorm."""

    kernel: jax.Array
    bias: jax.Array


def fold(
    kernel: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float, more_bias: Any = None
) -> Folded:
    """The convolution that is equivalent to that with `kernel`, followed by the BatchNorm.

        kernel * a, bias - mean * a    with a = scale / sqrt(var + epsilon)

    The arithmetic runs in float64, because it happens only once. The folded kernel has the dtype of
    `kernel`, and the bias has the dtype of `mean`.

    Args:
        kernel: convolution kernel with the output channels last.
        scale: shape (C,), or None for 1.
        bias: shape (C,), or None for 0.
        mean: shape (C,).
        var: shape (C,).
        epsilon: epsilon of the BatchNorm.
        more_bias: another bias to add, or None.
    """
    wide = {n: np.asarray(v, np.float64) for n, v in (("mean", mean), ("var", var))}
    a = 1 / np.sqrt(wide["var"] + epsilon)
    if scale is not None:
        a = a * np.asarray(scale, np.float64)
    shift = -wide["mean"] * a
    for given in (bias, more_bias):
        if given is not None:
            shift = shift + np.asarray(given, np.float64)
    return Folded(
        jnp.asarray(np.asarray(kernel, np.float64) * a, kernel.dtype),
        jnp.asarray(shift, mean.dtype),
    )


def folded_call(layer: Any, x: jax.Array, bias: jax.Array, residual: jax.Array | None) -> jax.Array:
    """act(x + bias + residual), as the fields of a `FoldedBatchNorm` say."""
    activation = layer_activation("FoldedBatchNorm", "activation", layer.activation)
    if residual is not None:
        # They differ where the norms have another dtype than the convolutions.
        dtype = promoted(x.dtype, residual.dtype)
        x, residual = x.astype(dtype), residual.astype(dtype)
    y = bias_act(
        x,
        residual,
        bias,
        activation=activation.fused,
        negative_slope=activation.negative_slope,
        implementation=layer.implementation,
    )
    return activation.finish(y if layer.dtype is None else y.astype(layer.dtype))
