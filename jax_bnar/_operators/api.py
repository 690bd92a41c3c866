"""The public operators with one input."""

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._operators.forms import infer, train


class BatchNormResult(NamedTuple):
    """Result of a training-mode operator.

    Attributes:
        y: the output, with the shape of x and the dtype `out_dtype`, or that of x.
        mean: batch mean, float32 (float64 for float64 x), of shape (C,), or (num_groups, C) if
            num_groups > 1.
        var: population variance of the batch, with the shape and dtype of mean.
    """

    y: jax.Array
    mean: jax.Array
    var: jax.Array


def bn_add_relu(
    x: ArrayLike,
    z: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    save: Save = "y",
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> BatchNormResult:
    """Fused `relu(batch_norm(x) + z)` with batch statistics.

        y = relu(scale * (x - mean) / sqrt(var + epsilon) + bias + z)

    mean and var are the mean and the population variance of each channel, over all other axes. The
    arithmetic runs in float32 (float64 for float64 x) and is rounded once, at the end. Forward and
    backward are one kernel call each; backward reads y (or a bit mask of y > 0) and never the
    pre-ReLU tensor. The operator is differentiable with respect to x, z, scale and bias, and
    through mean and var.

    Args:
        x: float16, bfloat16, float32 or float64, of any rank >= 2, with C channels along `axis`. It
            must not be empty.
        z: residual, with the shape of x and the dtype of y.
        scale: shape (C,), any float dtype, or None for 1.
        bias: shape (C,), any float dtype, or None for 0.
        epsilon: static, > 0; raised to the smallest normal number of the accumulation dtype if it
            is smaller.
        axis: the channel axis.
        axis_name: name of a mapped axis (`shard_map`, `pmap`, `vmap`), or a tuple of names, over
            which statistics are computed. With None, a mapped function computes the statistics of
            each device's (or example's) own part. Under `jit` alone, leave it None: the statistics
            are those of the whole array, however it is sharded.
        axis_index_groups: lists of indices of that axis, one list per group, of any sizes. Each
            group has separate statistics. JAX does not support such groups in `vmap`, nor in
            `shard_map` with check_vma=True.
        num_groups: number of ghost batches. The leading axis is split into this many equal groups,
            each with separate statistics.
        save: where backward finds the sign of the ReLU: "y" (which costs nothing if y is kept
            anyway) or "mask" (one bit per element, and y may be freed).
        out_dtype: the dtype of y and z: None for that of x, or float32 for an x of 16 bits, as
            where float32 follows a convolution in bfloat16. x is then read as it is, and no
            float32 copy of it is made or saved; dx has the dtype of x. CUDA has no kernel for
            that yet, and runs pure JAX.
        implementation: None (the kernel if there is one, otherwise pure JAX), "ffi" (the kernel, or
            NotImplementedError at lowering) or "xla" (pure JAX). The environment variable
            JAX_BNAR_IMPLEMENTATION sets the default.

    Returns:
        BatchNormResult(y, mean, var).

    Raises:
        ValueError: a shape or the value of an argument is invalid.
        TypeError: a dtype or the type of an argument is invalid.
        NameError: axis_name does not name a mapped axis in scope.
        NotImplementedError: implementation is "ffi", and the platform has no kernel; raised when
            the program is lowered.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, mean, var = jax_bnar.bn_add_relu(x, jnp.ones_like(x), jnp.ones(2), jnp.zeros(2))
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 1.0, 2.225]
        >>> mean.tolist()
        [2.0, 3.0]

    The backward formula and the use of y follow Kaixi Hou, "Demystifying the BatchNorm-Add-ReLU
    Fusion".
    """
    results = train(
        "bn_add_relu",
        (x,),
        _require_residual("bn_add_relu", z),
        (Affine(scale, bias),),
        "relu",
        epsilon=epsilon,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        num_groups=num_groups,
        save=save,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    return BatchNormResult(*results)


def bn_relu(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    save: Save = "y",
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> BatchNormResult:
    """Fused `relu(batch_norm(x))` with batch statistics: `bn_add_relu` without z.

    `bn_add_relu` describes the optional arguments in full.

    Args:
        x: float dtype, any rank >= 2, with C channels along `axis`.
        scale: shape (C,), or None for 1.
        bias: shape (C,), or None for 0.
        epsilon: static, > 0.
        axis: the channel axis.
        axis_name: name of a mapped axis, or a tuple of names, over which statistics are computed.
        axis_index_groups: lists of indices of that axis, each with separate statistics.
        num_groups: number of ghost batches.
        save: has no effect, because backward computes the sign of the ReLU from x, which it reads
            anyway.
        out_dtype: the dtype of y, None or float32.
        implementation: None, "ffi" or "xla".

    Returns:
        BatchNormResult(y, mean, var).

    Raises:
        ValueError, TypeError, NameError, NotImplementedError: as in `bn_add_relu`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, mean, var = jax_bnar.bn_relu(x, jnp.ones(2), jnp.zeros(2))
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 0.0, 1.225]
    """
    results = train(
        "bn_relu",
        (x,),
        None,
        (Affine(scale, bias),),
        "relu",
        epsilon=epsilon,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        num_groups=num_groups,
        save=save,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    return BatchNormResult(*results)


def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    save: Save = "y",
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> BatchNormResult:
    """`batch_norm(x)` with batch statistics: `bn_relu` without the activation.

    Arguments, results and errors are those of `bn_add_relu`. `save` has no effect, because backward
    has no ReLU whose sign it would need.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, mean, var = jax_bnar.batch_norm(x, jnp.ones(2), jnp.zeros(2))
        >>> [round(float(value), 3) for value in y[:, 0]]
        [-1.225, 0.0, 1.225]
    """
    results = train(
        "batch_norm",
        (x,),
        None,
        (Affine(scale, bias),),
        "none",
        epsilon=epsilon,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        num_groups=num_groups,
        save=save,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    return BatchNormResult(*results)


def bn_add_relu_inference(
    x: ArrayLike,
    z: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    var: ArrayLike,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Fused `relu(batch_norm(x) + z)` with given statistics, in one pass.

        y = relu(scale * (x - mean) / sqrt(var + epsilon) + bias + z)

    Differentiable with respect to every array; mean and var are ordinary operands here.

    Args:
        x: as in `bn_add_relu`.
        z: residual, with the shape of x and the dtype of y.
        scale: shape (C,), any float dtype, or None for 1.
        bias: shape (C,), any float dtype, or None for 0.
        mean: shape (C,), any float dtype.
        var: population variance, shape (C,), any float dtype.
        epsilon: static, > 0.
        axis: the channel axis.
        out_dtype: the dtype of y and z, as in `bn_add_relu`.
        implementation: as in `bn_add_relu`, but None runs the kernel on CPUs only and leaves other
            platforms to XLA, which fuses the operator with a convolution before it.

    Returns:
        y, with the shape of x and the dtype `out_dtype`, or that of x.

    Raises:
        ValueError, TypeError, NotImplementedError: as `bn_add_relu`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> z, mean, var = jnp.zeros_like(x), jnp.array([1.0, 1.0]), jnp.array([4.0, 4.0])
        >>> y = jax_bnar.bn_add_relu_inference(x, z, None, None, mean, var)
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 0.5, 1.5]
    """
    z = _require_residual("bn_add_relu_inference", z)
    return infer(
        "bn_add_relu_inference",
        (x,),
        z,
        (Affine(scale, bias),),
        (Statistics(mean, var),),
        "relu",
        epsilon=epsilon,
        axis=axis,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def bn_relu_inference(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    var: ArrayLike,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Fused `relu(batch_norm(x))` with given statistics: `bn_add_relu_inference` without z.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y = jax_bnar.bn_relu_inference(x, None, None, jnp.ones(2), jnp.full(2, 4.0))
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 0.5, 1.5]
    """
    return infer(
        "bn_relu_inference",
        (x,),
        None,
        (Affine(scale, bias),),
        (Statistics(mean, var),),
        "relu",
        epsilon=epsilon,
        axis=axis,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def batch_norm_inference(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    var: ArrayLike,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`batch_norm(x)` with given statistics: `bn_relu_inference` without the activation.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y = jax_bnar.batch_norm_inference(x, None, None, jnp.ones(2), jnp.full(2, 4.0))
        >>> [round(float(value), 3) for value in y[:, 0]]
        [-0.5, 0.5, 1.5]
    """
    return infer(
        "batch_norm_inference",
        (x,),
        None,
        (Affine(scale, bias),),
        (Statistics(mean, var),),
        "none",
        epsilon=epsilon,
        axis=axis,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def _require_residual(function: str, z: Any) -> Any:
    if z is None:
        raise TypeError(
            f"{function}: z must be an array, got None; without a residual, call"
            f" {function.replace('_add', '')}."
        )
    return z
