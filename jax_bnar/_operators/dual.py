"""`dual_bn_add_relu`: the join of a residual block whose shortcut also ends in a BatchNorm."""

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._operators.forms import infer, train


class DualBatchNormResult(NamedTuple):
    """Result of `dual_bn_add_relu` and `dual_bn_act`.

    Attributes:
        y: the output, with the shape and dtype of x1.
        mean1: batch mean of x1, as in `BatchNormResult`.
        var1: population variance of x1.
        mean2: batch mean of x2.
        var2: population variance of x2.
    """

    y: jax.Array
    mean1: jax.Array
    var1: jax.Array
    mean2: jax.Array
    var2: jax.Array


def dual_bn_add_relu(
    x1: ArrayLike,
    x2: ArrayLike,
    scale1: ArrayLike | None,
    bias1: ArrayLike | None,
    scale2: ArrayLike | None,
    bias2: ArrayLike | None,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    save: Save = "y",
    implementation: Implementation = None,
) -> DualBatchNormResult:
    """Fused `relu(batch_norm(x1) + batch_norm(x2))` with batch statistics.

    This is the join of a residual block that downsamples.

        y = relu(scale1 * (x1 - mean1) / sqrt(var1 + epsilon) + bias1
                 + scale2 * (x2 - mean2) / sqrt(var2 + epsilon) + bias2)

    Each channel is normalised by itself, in the accumulation dtype, and y is rounded once. Forward
    and backward are one kernel call each. After the statistics, forward reads x1 and x2 and writes
    y, whereas two operators would write the normalised x2 and read it again. Backward computes both
    gradients in one pass for the sums and one for the results. It keeps x1 and x2, with save="mask"
    also a mask, and no pre-ReLU tensor. The operator is differentiable with respect to every array,
    and through the four statistics.

    Args:
        x1: as x in `bn_add_relu`.
        x2: with the shape and dtype of x1.
        scale1: shape (C,), any float dtype, or None for 1.
        bias1: shape (C,), any float dtype, or None for 0.
        scale2: the scale of x2, as scale1.
        bias2: the bias of x2, as bias1.
        epsilon: as in `bn_add_relu`, for both inputs.
        axis: the channel axis.
        axis_name: as in `bn_add_relu`.
        axis_index_groups: as in `bn_add_relu`.
        num_groups: ghost batch, as in `bn_add_relu`.
        save: where backward finds the sign of the ReLU. "y" saves nothing more, because backward
            finds it in x1 and x2, which it reads anyway, as in `bn_relu`; "mask" saves one bit per
            element, which takes up to 7 % less time in float32 on CPUs.
        implementation: None, "ffi" or "xla", as in `bn_add_relu`.

    Returns:
        DualBatchNormResult(y, mean1, var1, mean2, var2).

    Raises:
        ValueError, TypeError, NameError, NotImplementedError: as in `bn_add_relu`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, *statistics = jax_bnar.dual_bn_add_relu(x, 2 * x, None, None, None, None)
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 0.0, 2.449]
    """
    results = train(
        "dual_bn_add_relu",
        (x1, x2),
        None,
        (Affine(scale1, bias1), Affine(scale2, bias2)),
        "relu",
        epsilon=epsilon,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        num_groups=num_groups,
        save=save,
        implementation=implementation,
    )
    return DualBatchNormResult(*results)


def dual_bn_add_relu_inference(
    x1: ArrayLike,
    x2: ArrayLike,
    scale1: ArrayLike | None,
    bias1: ArrayLike | None,
    scale2: ArrayLike | None,
    bias2: ArrayLike | None,
    mean1: ArrayLike,
    var1: ArrayLike,
    mean2: ArrayLike,
    var2: ArrayLike,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    implementation: Implementation = None,
) -> jax.Array:
    """Fused `relu(batch_norm(x1) + batch_norm(x2))` with given statistics, in one pass.

        y = relu(scale1 * (x1 - mean1) / sqrt(var1 + epsilon) + bias1
                 + scale2 * (x2 - mean2) / sqrt(var2 + epsilon) + bias2)

    Differentiable with respect to every array; the statistics are ordinary operands here.

    Args:
        x1: as x in `bn_add_relu`.
        x2: with the shape and dtype of x1.
        scale1: shape (C,), any float dtype, or None for 1.
        bias1: shape (C,), any float dtype, or None for 0.
        scale2: the scale of x2, as scale1.
        bias2: the bias of x2, as bias1.
        mean1: mean of x1, shape (C,), any float dtype.
        var1: population variance of x1, shape (C,), any float dtype.
        mean2: mean of x2, as mean1.
        var2: population variance of x2, as var1.
        epsilon: static, > 0, for both inputs.
        axis: the channel axis.
        implementation: as in `bn_add_relu_inference`.

    Returns:
        y, with the shape and dtype of x1.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `bn_add_relu`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> affine, statistics = (None, None), (jnp.ones(2), jnp.full(2, 4.0))
        >>> given = (*affine, *affine, *statistics, *statistics)
        >>> y = jax_bnar.dual_bn_add_relu_inference(x, x, *given)
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 1.0, 3.0]
    """
    return infer(
        "dual_bn_add_relu_inference",
        (x1, x2),
        None,
        (Affine(scale1, bias1), Affine(scale2, bias2)),
        (Statistics(mean1, var1), Statistics(mean2, var2)),
        "relu",
        epsilon=epsilon,
        axis=axis,
        implementation=implementation,
    )
