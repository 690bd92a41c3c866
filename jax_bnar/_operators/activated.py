"""The public operators with any activation that is fused."""

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_bnar._base.activations import NO_ACTIVATION, FusedActivation, fused_activation, names
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._operators.api import BatchNormResult
from jax_bnar._operators.dual import DualBatchNormResult
from jax_bnar._operators.forms import infer, train
from jax_bnar._operators.validation import described_value


def bn_act(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    activation: Any,
    *,
    z: ArrayLike | None = None,
    epsilon: float = 1e-5,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    save: Save = "y",
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> BatchNormResult:
    """Fused `act(batch_norm(x) + z)` with batch statistics, for activations other than ReLU too.

        u = scale * (x - mean) / sqrt(var + epsilon) + bias + z
        y = act(u)

    Activations are those of `jax.nn`, in value and in derivative. Forward and backward are one
    kernel call each, on CPUs and GPUs; for ReLU they are those of `bn_add_relu`. Backward never
    keeps u. With ReLU6 and leaky ReLU, it finds the derivative in y, in a mask or, without z, in x,
    as `bn_add_relu` and `bn_relu` do. With the others, it computes u again from x, the statistics
    and z, and `save` has no effect. Without an activation ("none") it needs neither, and dz is dy
    itself: that is the linear bottleneck of MobileNetV2 and EfficientNet, `batch_norm(x) + z`.

    Args:
        x: as in `bn_add_relu`.
        scale: shape (C,), any float dtype, or None for 1.
        bias: shape (C,), any float dtype, or None for 0.
        activation: "relu", "relu6", "leaky_relu", "silu" (or "swish"), "hard_silu" (or
            "hard_swish"), "elu" (with alpha 1), "gelu" (in the approximation by tanh, which is the
            default of `jax.nn.gelu`), "mish", "none", or the function of `jax.nn` of that name. A
            slope for a leaky ReLU, at least 0 and below 1, is given as
            `functools.partial(jax.nn.leaky_relu, negative_slope=0.1)`; without one it is 0.01. The
            GELU without an approximation is "exact_gelu", or
            `functools.partial(jax.nn.gelu, approximate=False)`. None is "none".
        z: residual, with the shape of x and the dtype of y, or None.
        epsilon: static, > 0.
        axis: the channel axis.
        axis_name: name of a mapped axis, or a tuple of names, over which statistics are computed.
        axis_index_groups: lists of indices of that axis, each with separate statistics.
        num_groups: number of ghost batches.
        save: "y" or "mask", as in `bn_add_relu`.
        out_dtype: as in `bn_add_relu`, for the activations "relu" and "none".
        implementation: None, "ffi" or "xla", as in `bn_add_relu`.

    Returns:
        BatchNormResult(y, mean, var).

    Raises:
        ValueError: a shape or the value of an argument is invalid, such as an unknown name.
        TypeError: a dtype or the type of an argument is invalid, or the activation is a function
            that cannot be fused.
        NameError, NotImplementedError: as in `bn_add_relu`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, mean, var = jax_bnar.bn_act(x, jnp.ones(2), jnp.zeros(2), jax.nn.silu)
        >>> [round(float(value), 3) for value in y[:, 0]]
        [-0.278, 0.0, 0.947]

    That backward needs neither u nor a copy of it is the idea of InPlace-ABN (Rota Bulo and others,
    2018), which inverts the activation of y; here x is kept anyway, as the input of the operator.
    """
    fused = _checked("bn_act", activation)
    results = train(
        "bn_act",
        (x,),
        z,
        (Affine(scale, bias),),
        fused.name,
        negative_slope=fused.negative_slope,
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


def bn_act_inference(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    var: ArrayLike,
    activation: Any,
    *,
    z: ArrayLike | None = None,
    epsilon: float = 1e-5,
    axis: int = -1,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Fused `act(batch_norm(x) + z)` with given statistics: `bn_act` for evaluation.

    Arguments and errors are those of `bn_act` and `bn_add_relu_inference`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> mean, var = jnp.ones(2), jnp.full(2, 4.0)
        >>> y = jax_bnar.bn_act_inference(x, None, None, mean, var, "silu")
        >>> [round(float(value), 3) for value in y[:, 0]]
        [-0.189, 0.311, 1.226]
    """
    fused = _checked("bn_act_inference", activation)
    return infer(
        "bn_act_inference",
        (x,),
        z,
        (Affine(scale, bias),),
        (Statistics(mean, var),),
        fused.name,
        negative_slope=fused.negative_slope,
        epsilon=epsilon,
        axis=axis,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def dual_bn_act(
    x1: ArrayLike,
    x2: ArrayLike,
    scale1: ArrayLike | None,
    bias1: ArrayLike | None,
    scale2: ArrayLike | None,
    bias2: ArrayLike | None,
    activation: Any,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    num_groups: int = 1,
    save: Save = "y",
    implementation: Implementation = None,
) -> DualBatchNormResult:
    """Fused `act(batch_norm(x1) + batch_norm(x2))`, for activations other than ReLU too.

    The join of a residual block that downsamples, as `dual_bn_add_relu` computes it, with the
    activations of `bn_act`. Forward and backward are one kernel call each. Backward keeps x1 and
    x2, from which it computes again what came before the activation, if there is one.

    Args:
        x1: as in `dual_bn_add_relu`, as are the next five.
        x2: with the shape and dtype of x1.
        scale1: shape (C,), any float dtype, or None for 1.
        bias1: shape (C,), any float dtype, or None for 0.
        scale2: the scale of x2.
        bias2: the bias of x2.
        activation: as in `bn_act`.
        epsilon: as in `bn_act`, for both inputs.
        axis: the channel axis.
        axis_name: as in `bn_act`.
        axis_index_groups: as in `bn_act`.
        num_groups: as in `bn_act`.
        save: "y", with which nothing is saved but x1 and x2, or "mask", one bit per element for
            ReLU, ReLU6 and leaky ReLU.
        implementation: None, "ffi" or "xla", as in `bn_add_relu`.

    Returns:
        DualBatchNormResult(y, mean1, var1, mean2, var2).

    Raises:
        ValueError, TypeError, NameError, NotImplementedError: as in `bn_act`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y, *_ = jax_bnar.dual_bn_act(x, 2 * x, None, None, None, None, jax.nn.silu)
        >>> [round(float(value), 3) for value in y[:, 0]]
        [-0.195, 0.0, 2.254]
    """
    fused = _checked("dual_bn_act", activation)
    results = train(
        "dual_bn_act",
        (x1, x2),
        None,
        (Affine(scale1, bias1), Affine(scale2, bias2)),
        fused.name,
        negative_slope=fused.negative_slope,
        epsilon=epsilon,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        num_groups=num_groups,
        save=save,
        implementation=implementation,
    )
    return DualBatchNormResult(*results)


def dual_bn_act_inference(
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
    activation: Any,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    implementation: Implementation = None,
) -> jax.Array:
    """Fused `act(batch_norm(x1) + batch_norm(x2))` with given statistics.

    It is what `dual_bn_act` becomes in evaluation, with running statistics.

    Arguments and errors are those of `dual_bn_act` and `dual_bn_add_relu_inference`.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> affine, statistics = (None, None), (jnp.ones(2), jnp.full(2, 4.0))
        >>> given = (*affine, *affine, *statistics, *statistics)
        >>> y = jax_bnar.dual_bn_act_inference(x, x, *given, "silu")
        >>> [round(float(value), 3) for value in y[:, 0]]
        [-0.269, 0.731, 2.858]
    """
    fused = _checked("dual_bn_act_inference", activation)
    return infer(
        "dual_bn_act_inference",
        (x1, x2),
        None,
        (Affine(scale1, bias1), Affine(scale2, bias2)),
        (Statistics(mean1, var1), Statistics(mean2, var2)),
        fused.name,
        negative_slope=fused.negative_slope,
        epsilon=epsilon,
        axis=axis,
        implementation=implementation,
    )


def _checked(function: str, activation: Any) -> FusedActivation:
    fused = NO_ACTIVATION if activation is None else fused_activation(activation)
    if fused is not None:
        return fused
    if isinstance(activation, str):
        raise ValueError(f"{function}: activation must be {names()}, got {activation!r}.")
    function_of_partial, hint = getattr(activation, "func", None), ""
    if function_of_partial is jax.nn.leaky_relu:
        hint = (
            "; the slope of a leaky ReLU is a Python number from 0 to below 1, by keyword:"
            " functools.partial(jax.nn.leaky_relu, negative_slope=0.1)"
        )
    elif function_of_partial is jax.nn.elu:
        hint = "; the alpha of an ELU must be 1"
    raise TypeError(
        f"{function}: activation must be {names()}, None or the function of jax.nn of that name,"
        f" got {described_value(activation)}; apply another function to the result of"
        f" activation='none'{hint}."
    )
