"""Folding a BatchNorm with fixed statistics into the convolution before it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.config import Activation
from jax_bnar._base.implementation import Implementation
from jax_bnar._operators import api

# With these, 1/sqrt(var + epsilon) is exactly 1 in every accumulation dtype, so that normalising
# with mean 0 changes nothing.
_EPSILON = 2.0**-17
_VAR = 1 - _EPSILON


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


def bias_act(
    x: jax.Array,
    residual: jax.Array | None,
    bias: jax.Array,
    *,
    activation: Activation,
    implementation: Implementation,
) -> jax.Array:
    """act(x + bias + residual), channels last, in one pass of the inference kernel.

    The kernel adds the bias, because the convolution would need another pass over memory for it.
    """
    mean, var = jnp.zeros_like(bias), jnp.full_like(bias, _VAR)
    vectors = (None, bias, mean, var)
    options: dict[str, Any] = {"epsilon": _EPSILON, "implementation": implementation}
    if activation == "none":
        y = api.batch_norm_inference(x, *vectors, **options)
        return y if residual is None else y + residual
    if residual is None:
        return api.bn_relu_inference(x, *vectors, **options)
    return api.bn_add_relu_inference(x, residual, *vectors, **options)
