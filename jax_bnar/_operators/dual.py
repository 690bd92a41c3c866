"""`dual_bn_add_relu`: the join of a block whose shortcut has a BatchNorm of its own."""

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from jax_bnar._operators.api import batch_norm, bn_add_relu
from jax_bnar._operators.validation import check_like, check_operands, check_vector

_NAME = "dual_bn_add_relu"


class DualBatchNormResult(NamedTuple):
    """Result of `dual_bn_add_relu`.

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
    save: str = "y",
    implementation: str | None = None,
) -> DualBatchNormResult:
    """`relu(batch_norm(x1) + batch_norm(x2))` with batch statistics: where a block downsamples.

        y = relu(scale1 * (x1 - mean1) / sqrt(var1 + epsilon) + bias1
                 + scale2 * (x2 - mean2) / sqrt(var2 + epsilon) + bias2)

    per channel. It is `batch_norm` of x2, whose result is the residual of `bn_add_relu`: two kernel
    calls forward and two backward. The normalised x2 is an array of its own for that long, rounded
    to the dtype of x2; backward keeps x1, x2 and y or the mask, and neither it nor any
    other array from before the ReLU. Differentiable in every array, and through the statistics.

    Args:
        x1: as x in `bn_add_relu`.
        x2: with the shape and dtype of x1.
        scale1: shape (C,), any float dtype, or None for 1.
        bias1: shape (C,), any float dtype, or None for 0.
        scale2: as scale1, of x2.
        bias2: as bias1, of x2.
        epsilon: as the other keywords, that of `bn_add_relu`, for both.
        axis: the channel axis.
        axis_name: as in `bn_add_relu`.
        axis_index_groups: as in `bn_add_relu`.
        num_groups: ghost batch, as in `bn_add_relu`.
        save: "y" or "mask", as in `bn_add_relu`.
        implementation: None, "ffi" or "xla", as in `bn_add_relu`.

    Returns:
        DualBatchNormResult(y, mean1, var1, mean2, var2).

    Raises:
        ValueError, TypeError, NotImplementedError: as `bn_add_relu`.
    """
    _check(x1, x2, scale1, bias1, scale2, bias2, axis)
    options: dict[str, Any] = {
        "epsilon": epsilon,
        "axis": axis,
        "axis_name": axis_name,
        "axis_index_groups": axis_index_groups,
        "num_groups": num_groups,
        "save": save,
        "implementation": implementation,
    }
    with jax.named_scope(_NAME):
        z, mean2, var2 = batch_norm(x2, scale2, bias2, **options)
        y, mean1, var1 = bn_add_relu(x1, z, scale1, bias1, **options)
    return DualBatchNormResult(y, mean1, var1, mean2, var2)


def _check(x1: Any, x2: Any, scale1: Any, bias1: Any, scale2: Any, bias2: Any, axis: Any) -> None:
    """What the two calls would blame on an "x" or a "scale" that the user did not pass."""
    check_operands(_NAME, x1, None, None, None, axis=axis)
    check_like(_NAME, "x2", x2, x1, "x1")
    vectors = {"scale1": scale1, "bias1": bias1, "scale2": scale2, "bias2": bias2}
    for name, vector in vectors.items():
        check_vector(_NAME, name, vector, x1, axis)
