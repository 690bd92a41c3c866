"""Paddle's `fused_bn_add_activation` and its gradient.

Names, order and meaning of operands and results are those of the operator of that name in Paddle
(`paddle/phi/kernels/fusion/gpu/fused_bn_add_activation_kernel.cu`), which calls cuDNN and supports
only float16, NHWC, numbers of channels that are multiples of four, and a single NVIDIA GPU.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_bnar import primitive, reference
from jax_bnar._autodiff.training import training
from jax_bnar._base.config import Config
from jax_bnar._base.dtypes import smallest_epsilon
from jax_bnar._base.implementation import Implementation, resolve_implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._operators.validation import (
    check_epsilon,
    check_flag,
    check_like,
    check_momentum,
    check_statistic,
    check_vector,
    check_x,
)
from jax_bnar._sharding.alignment import align_operands
from jax_bnar.ops._arguments import (
    check_data_format,
    check_mask,
    moved,
    unbiased_factor,
)

DataFormat = Literal["NHWC", "NCHW"]

_FORWARD = "fused_bn_add_activation"
_GRAD = "fused_bn_add_activation_grad"
_AXES = {"NHWC": -1, "NCHW": 1}


class FusedBnAddActivation(NamedTuple):
    """Result of `fused_bn_add_activation`.

    Attributes:
        relu_out: relu(batch_norm(x) + z), with the shape and dtype of x.
        mean_out: the new running mean, with the dtype of the old one.
        variance_out: the new running variance, with the dtype of the old one.
        saved_mean: batch mean, float32 (float64 for float64 x), shape (C,).
        saved_variance: despite its name, and as in Paddle, the inverse standard deviation of the
            batch, 1 / sqrt(var + epsilon), with the dtype and shape of saved_mean.
        reserve_space: the mask relu_out > 0, uint8, one bit per element of x in row-major order,
            lowest bit first: the bytes of `jnp.packbits(relu_out > 0, bitorder="little")`. Its
            leading axes may be those of x, so that it can be sharded like x. (In Paddle it is an
            opaque buffer of cuDNN.)
    """

    relu_out: jax.Array
    mean_out: jax.Array
    variance_out: jax.Array
    saved_mean: jax.Array
    saved_variance: jax.Array
    reserve_space: jax.Array


class FusedBnAddActivationGrad(NamedTuple):
    """Result of `fused_bn_add_activation_grad`.

    Attributes:
        x_grad: cotangent of x, with the shape and dtype of x.
        z_grad: relu_out_grad where relu_out > 0 and 0 elsewhere, with the shape and dtype of x.
        scale_grad: shape (C,), with the dtype of scale (that of saved_mean if scale is None).
        bias_grad: shape (C,), with the dtype of bias (that of saved_mean if bias is None).
    """

    x_grad: jax.Array
    z_grad: jax.Array
    scale_grad: jax.Array
    bias_grad: jax.Array


def fused_bn_add_activation(
    x: ArrayLike,
    z: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    variance: ArrayLike,
    *,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    act_type: Literal["relu"] = "relu",
    data_format: DataFormat = "NHWC",
    unbiased_running_variance: bool = False,
    implementation: Implementation = None,
) -> FusedBnAddActivation:
    """Paddle's fused BatchNorm-Add-ReLU in training, with its six results.

        relu_out = relu(scale * (x - saved_mean) * saved_variance + bias + z)
        mean_out = momentum * mean + (1 - momentum) * saved_mean
        variance_out = momentum * variance + (1 - momentum) * var

    saved_mean is the mean of each channel, var its population variance, and saved_variance is
    1 / sqrt(var + epsilon). The operator is one kernel call, and differentiable with respect to
    every array and through every floating-point result. Backward is also one kernel call, which
    reads x and reserve_space.

    Args:
        x: float16, bfloat16, float32 or float64; rank >= 2, any number of channels, not empty.
        z: residual, with the shape and dtype of x.
        scale: shape (C,), any float dtype, or None for 1.
        bias: shape (C,), any float dtype, or None for 0.
        mean: running mean, shape (C,), any float dtype.
        variance: running variance, shape (C,), any float dtype.
        momentum: static, weight of the old running statistics, from 0 to 1.
        epsilon: static, > 0 (Paddle raises it to 1e-5).
        act_type: "relu", the only activation there is.
        data_format: "NHWC" for channels along the last axis, "NCHW" for the second one; x may have
            any rank.
        unbiased_running_variance: whether variance_out uses the unbiased variance of the batch,
            n/(n-1) * var, as Paddle's kernel (cuDNN) does. False uses var, as Flax and oneDNN do.
        implementation: as in `jax_bnar.bn_add_relu`.

    Returns:
        FusedBnAddActivation(relu_out, mean_out, variance_out, saved_mean, saved_variance,
        reserve_space).

    Raises:
        ValueError: a shape, or the value of an argument, does not fit.
        TypeError: a dtype, or the type of an argument, does not fit.
        NotImplementedError: implementation is "ffi", and the platform has no kernel.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x, zero, one = jnp.arange(6.0).reshape(3, 1, 1, 2), jnp.zeros(2), jnp.ones(2)
        >>> result = jax_bnar.ops.fused_bn_add_activation(x, x, one, zero, zero, one)
        >>> [round(float(value), 3) for value in result.relu_out[..., 0].ravel()]
        [0.0, 2.0, 5.225]
        >>> [round(float(value), 3) for value in result.saved_mean]
        [2.0, 3.0]
    """
    x = check_x(_FORWARD, x)
    layout = check_data_format(_FORWARD, data_format, _AXES, x.shape)
    z = check_like(_FORWARD, "z", z, x)
    vectors = _vectors(_FORWARD, x, layout.axis, scale=scale, bias=bias)
    statistics = _statistics(_FORWARD, x, layout.axis, mean=mean, variance=variance)
    weight = check_momentum(_FORWARD, "momentum", momentum)
    check_flag(_FORWARD, "unbiased_running_variance", unbiased_running_variance)
    if act_type != "relu":
        raise ValueError(f"{_FORWARD}: act_type must be 'relu', got {act_type!r}.")
    config = Config(
        epsilon=check_epsilon(_FORWARD, epsilon),
        activation="relu",
        save="mask",
        implementation=resolve_implementation(_FORWARD, implementation),
        has_z=True,
        layout=layout,
    )
    factor = unbiased_factor(layout, x.shape) if unbiased_running_variance else 1.0
    with jax.named_scope(_FORWARD):
        (x, z), (affine, (old_mean, old_var)) = align_operands(
            layout, (x, z), (Affine(*vectors), statistics)
        )
        y, batch, mask = training((x,), z, (affine,), config, save_mask=True)
        assert mask is not None
        ((batch_mean, batch_var),) = batch
        return FusedBnAddActivation(
            relu_out=y,
            mean_out=moved(old_mean, batch_mean, weight, jnp.asarray(mean).dtype),
            variance_out=moved(old_var, batch_var, weight, jnp.asarray(variance).dtype, factor),
            saved_mean=batch_mean[0],
            saved_variance=reference.reciprocal_std(batch_var, config.epsilon)[0],
            reserve_space=mask,
        )


def fused_bn_add_activation_grad(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    relu_out: ArrayLike | None,
    saved_mean: ArrayLike,
    saved_variance: ArrayLike,
    reserve_space: ArrayLike | None,
    relu_out_grad: ArrayLike,
    *,
    data_format: DataFormat = "NHWC",
    implementation: Implementation = None,
) -> FusedBnAddActivationGrad:
    """The gradient of `fused_bn_add_activation`, in one kernel call, for explicit backward passes.

    With e = relu_out_grad where relu_out > 0 and 0 elsewhere, n elements per channel, and
    xhat = (x - saved_mean) * saved_variance:

        z_grad = e    bias_grad = sum(e)    scale_grad = sum(e * xhat)
        x_grad = scale * saved_variance * (e - (bias_grad + xhat * scale_grad) / n)

    `jax.grad` of `fused_bn_add_activation` gives the same. Paddle's operator also takes momentum
    and epsilon, but nothing depends on them, because saved_variance already includes epsilon.

    Args:
        x: as in `fused_bn_add_activation`.
        scale: as in `fused_bn_add_activation`.
        bias: used only for the dtype of bias_grad; may be None.
        relu_out: read only if there is no reserve_space; otherwise it may be None.
        saved_mean: the result of that name.
        saved_variance: the result of that name, which is 1 / sqrt(var + epsilon).
        reserve_space: the result of that name, or None if relu_out is given.
        relu_out_grad: with the shape and dtype of x.
        data_format: as in `fused_bn_add_activation`.
        implementation: as in `jax_bnar.bn_add_relu`.

    Returns:
        FusedBnAddActivationGrad(x_grad, z_grad, scale_grad, bias_grad).

    Raises:
        ValueError: a shape, or the value of an argument, does not fit.
        TypeError: a dtype, or the type of an argument, does not fit.
        NotImplementedError: implementation is "ffi", and the platform has no kernel.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x, zero, one = jnp.arange(6.0).reshape(3, 1, 1, 2), jnp.zeros(2), jnp.ones(2)
        >>> result = jax_bnar.ops.fused_bn_add_activation(x, x, one, zero, zero, one)
        >>> saved = result.saved_mean, result.saved_variance, result.reserve_space
        >>> gradients = jax_bnar.ops.fused_bn_add_activation_grad(
        ...     x, one, zero, None, *saved, jnp.ones_like(x)
        ... )
        >>> [round(float(value), 3) for value in gradients.bias_grad]
        [2.0, 2.0]
    """
    x = check_x(_GRAD, x)
    layout = check_data_format(_GRAD, data_format, _AXES, x.shape)
    dy = check_like(_GRAD, "relu_out_grad", relu_out_grad, x)
    factor, _ = _vectors(_GRAD, x, layout.axis, scale=scale, bias=bias)
    statistics = _statistics(
        _GRAD, x, layout.axis, saved_mean=saved_mean, saved_variance=saved_variance
    )
    if relu_out is None and reserve_space is None:
        raise TypeError(f"{_GRAD}: one of reserve_space and relu_out must be an array.")
    y = None if relu_out is None else check_like(_GRAD, "relu_out", relu_out, x)
    mask = None
    if reserve_space is not None:
        mask = check_mask(_GRAD, "reserve_space", reserve_space, layout, x.shape)
    chosen = resolve_implementation(_GRAD, implementation)
    with jax.named_scope(_GRAD):
        (tensor, dy), ((mean, rstd), factor) = align_operands(layout, (x, dy), (statistics, factor))
        saved = mask
        if mask is None:
            (_, saved), _ = align_operands(layout, (tensor, y), ())
        # The kernel takes a variance and adds an epsilon to it, so we subtract the smallest epsilon
        # that it accepts beforehand.
        least = smallest_epsilon(rstd.dtype)
        var = jnp.maximum(jnp.square(1 / rstd) - jnp.asarray(least, rstd.dtype), 0)
        zero = jnp.zeros_like(mean)
        (dx,), (dscale,), dbias, dz = primitive.OPERATIONS[1].backward(
            *(dy, (tensor,), saved, (Statistics(mean, var),), (Affine(factor, None),)),
            (Statistics(zero, zero),),
            layout=layout,
            implementation=chosen,
            epsilon=least,
            gate="y" if mask is None else "mask",
            has_z=True,
        )
    return FusedBnAddActivationGrad(
        dx, dz, _as_dtype_of(dscale[0], scale), _as_dtype_of(dbias[0], bias)
    )


def _vectors(function: str, x: jax.Array, axis: int, **named: Any) -> list[jax.Array | None]:
    return [check_vector(function, name, vector, x, axis) for name, vector in named.items()]


def _statistics(function: str, x: jax.Array, axis: int, **named: Any) -> list[jax.Array]:
    return [check_statistic(function, name, vector, x, axis) for name, vector in named.items()]


def _as_dtype_of(gradient: jax.Array, operand: Any) -> jax.Array:
    return gradient if operand is None else gradient.astype(jnp.asarray(operand).dtype)
