"""The BatchNorm operators of oneDNN Graph, with the flags of oneDNN's primitive on each.

Operands, results and attributes are those of BatchNormForwardTraining, BatchNormInference and
BatchNormTrainingBackward in oneDNN Graph; `use_global_stats`, `fuse_norm_relu` and
`fuse_norm_add_relu` are flags of its batch normalisation primitive. gamma and beta may each be
omitted, in place of its flags `use_scale` and `use_shift`. oneDNN itself implements
`fuse_norm_add_relu` neither for CPUs nor for NVIDIA GPUs.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_bnar import primitive, reference
from jax_bnar._autodiff.inference import inference
from jax_bnar._autodiff.training import training
from jax_bnar._base.config import Config
from jax_bnar._base.gates import Gate
from jax_bnar._base.implementation import Implementation, resolve_implementation
from jax_bnar._base.inputs import Affine, Coefficients, Statistics
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._operators.validation import (
    check_epsilon,
    check_like,
    check_momentum,
    check_statistic,
    check_vector,
    check_x,
)
from jax_bnar._sharding.alignment import align_operands
from jax_bnar.ops._arguments import check_data_format, check_mask, moved

DataFormat = Literal["NXC", "NCX"]

_TRAINING = "batch_norm_forward_training"
_INFERENCE = "batch_norm_inference"
_BACKWARD = "batch_norm_training_backward"
_AXES = {"NXC": -1, "NCX": 1}


class ForwardTraining(NamedTuple):
    """Result of `batch_norm_forward_training`.

    Attributes:
        dst: the normalised array, with the shape and dtype of src.
        running_mean: the new running mean, with the dtype of the old one (mean).
        running_variance: the new running variance, with the dtype of the old one (variance).
        batch_mean: mean of the batch, with the dtype of mean.
        batch_variance: population variance of the batch, with the dtype of variance.
        workspace: with one of the ReLU flags, the mask dst > 0, uint8, one bit per element of src
            in row-major order, lowest bit first; otherwise None.
    """

    dst: jax.Array
    running_mean: jax.Array
    running_variance: jax.Array
    batch_mean: jax.Array
    batch_variance: jax.Array
    workspace: jax.Array | None


class TrainingBackward(NamedTuple):
    """Result of `batch_norm_training_backward`.

    Attributes:
        diff_src: cotangent of src, with the shape and dtype of src.
        diff_gamma: shape (C,), with the dtype of gamma (of mean if there is no gamma), or None.
        diff_beta: shape and dtype of diff_gamma, or None if diff_gamma is None.
        diff_src_1: with fuse_norm_add_relu, diff_dst where dst > 0 and 0 elsewhere; otherwise None.
    """

    diff_src: jax.Array
    diff_gamma: jax.Array | None
    diff_beta: jax.Array | None
    diff_src_1: jax.Array | None


def batch_norm_forward_training(
    src: ArrayLike,
    mean: ArrayLike,
    variance: ArrayLike,
    gamma: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    src_1: ArrayLike | None = None,
    *,
    epsilon: float,
    momentum: float = 0.5,
    data_format: DataFormat = "NXC",
    use_global_stats: bool = False,
    fuse_norm_relu: bool = False,
    fuse_norm_add_relu: bool = False,
    implementation: Implementation = None,
) -> ForwardTraining:
    """oneDNN Graph's BatchNormForwardTraining, in one kernel call.

        dst = gamma * (src - batch_mean) / sqrt(batch_variance + epsilon) + beta
        running_mean = momentum * mean + (1 - momentum) * batch_mean
        running_variance = momentum * variance + (1 - momentum) * batch_variance

    batch_mean and batch_variance are the mean and the population variance of each channel of src.
    The operator is differentiable with respect to every array and through every floating-point
    result.

    Args:
        src: float16, bfloat16, float32 or float64; rank >= 2, any number of channels, not empty.
        mean: running mean, shape (C,), any float dtype.
        variance: running variance, shape (C,), any float dtype.
        gamma: shape (C,), any float dtype, or None for 1.
        beta: shape (C,), any float dtype, or None for 0.
        src_1: with fuse_norm_add_relu, the array to add, with the shape and dtype of src.
        epsilon: static, > 0.
        momentum: static, weight of the old running statistics, from 0 to 1. The default is that of
            oneDNN's own backend.
        data_format: "NXC" for channels along the last axis, "NCX" for the second one.
        use_global_stats: normalise with the given mean and variance, which are then also returned
            as the running and the batch statistics.
        fuse_norm_relu: dst = relu(the dst above); workspace is returned as well.
        fuse_norm_add_relu: dst = relu(the dst above + src_1); workspace is returned as well.
        implementation: as in `jax_bnar.bn_add_relu`.

    Returns:
        ForwardTraining(dst, running_mean, running_variance, batch_mean, batch_variance, workspace).

    Raises:
        ValueError: a shape, or the value of an argument, does not fit.
        TypeError: a dtype, or the type of an argument, does not fit.
        NotImplementedError: implementation is "ffi", and the platform has no kernel.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> src, zero, one = jnp.arange(6.0).reshape(3, 2), jnp.zeros(2), jnp.ones(2)
        >>> result = jax_bnar.ops.batch_norm_forward_training(
        ...     src, zero, one, epsilon=1e-5, fuse_norm_relu=True
        ... )
        >>> [round(float(value), 3) for value in result.dst[:, 0]]
        [0.0, 0.0, 1.225]
        >>> [round(float(value), 3) for value in result.running_mean]
        [1.0, 1.5]
    """
    weight = check_momentum(_TRAINING, "momentum", momentum)
    operands, config = _forward_operands(
        *(_TRAINING, src, mean, variance, gamma, beta, src_1),
        *(epsilon, data_format, fuse_norm_relu, fuse_norm_add_relu, implementation),
    )
    mean_dtype, variance_dtype = jnp.asarray(mean).dtype, jnp.asarray(variance).dtype
    with jax.named_scope(_TRAINING):
        *tensors, ((old_mean, old_variance),) = operands
        if use_global_stats:
            dst, workspace = inference(*operands, config, config.save_mask)
            given = old_mean[0].astype(mean_dtype), old_variance[0].astype(variance_dtype)
            return ForwardTraining(dst, given[0], given[1], given[0], given[1], workspace)
        dst, batch, workspace = training(*tensors, config, config.save_mask)
        ((batch_mean, batch_variance),) = batch
        return ForwardTraining(
            dst=dst,
            running_mean=moved(old_mean, batch_mean, weight, mean_dtype),
            running_variance=moved(old_variance, batch_variance, weight, variance_dtype),
            batch_mean=batch_mean[0].astype(mean_dtype),
            batch_variance=batch_variance[0].astype(variance_dtype),
            workspace=workspace,
        )


def batch_norm_inference(
    src: ArrayLike,
    gamma: ArrayLike | None,
    beta: ArrayLike | None,
    mean: ArrayLike,
    variance: ArrayLike,
    src_1: ArrayLike | None = None,
    *,
    epsilon: float,
    data_format: DataFormat = "NXC",
    fuse_norm_relu: bool = False,
    fuse_norm_add_relu: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """oneDNN Graph's BatchNormInference: normalisation with given statistics, in one pass.

        dst = gamma * (src - mean) / sqrt(variance + epsilon) + beta

    The operator is differentiable with respect to every array.

    Args:
        src: as in `batch_norm_forward_training`.
        gamma: shape (C,), any float dtype, or None for 1.
        beta: shape (C,), any float dtype, or None for 0.
        mean: shape (C,), any float dtype.
        variance: shape (C,), any float dtype.
        src_1: with fuse_norm_add_relu, the array to add, with the shape and dtype of src.
        epsilon: static, > 0.
        data_format: "NXC" for channels along the last axis, "NCX" for the second one.
        fuse_norm_relu: dst = relu(the dst above).
        fuse_norm_add_relu: dst = relu(the dst above + src_1).
        implementation: as in `jax_bnar.bn_add_relu_inference`.

    Returns:
        dst, with the shape and dtype of src.

    Raises:
        ValueError: a shape, or the value of an argument, does not fit.
        TypeError: a dtype, or the type of an argument, does not fit.
        NotImplementedError: implementation is "ffi", and the platform has no kernel.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> src, zero, one = jnp.arange(6.0).reshape(3, 2), jnp.zeros(2), jnp.ones(2)
        >>> dst = jax_bnar.ops.batch_norm_inference(src, one, zero, 2 * one, 4 * one, epsilon=1e-5)
        >>> [round(float(value), 3) for value in dst[:, 0]]
        [-1.0, 0.0, 1.0]
    """
    operands, config = _forward_operands(
        *(_INFERENCE, src, mean, variance, gamma, beta, src_1),
        *(epsilon, data_format, fuse_norm_relu, fuse_norm_add_relu, implementation),
    )
    with jax.named_scope(_INFERENCE):
        dst, _ = inference(*operands, config)
    return dst


def batch_norm_training_backward(
    src: ArrayLike,
    diff_dst: ArrayLike,
    mean: ArrayLike,
    variance: ArrayLike,
    gamma: ArrayLike | None = None,
    *,
    epsilon: float,
    data_format: DataFormat = "NXC",
    diff_gamma_and_beta: bool | None = None,
    use_global_stats: bool = False,
    fuse_norm_relu: bool = False,
    fuse_norm_add_relu: bool = False,
    workspace: ArrayLike | None = None,
    dst: ArrayLike | None = None,
    implementation: Implementation = None,
) -> TrainingBackward:
    """oneDNN Graph's BatchNormTrainingBackward, in one kernel call.

    With n elements per channel, rstd = 1 / sqrt(variance + epsilon), xhat = (src - mean) * rstd,
    and e = diff_dst (with one of the ReLU flags, diff_dst where dst > 0 and 0 elsewhere):

        diff_gamma = sum(e * xhat)    diff_beta = sum(e)    diff_src_1 = e
        diff_src = gamma * rstd * (e - (diff_beta + xhat * diff_gamma) / n)

    With use_global_stats, mean and variance are constants and diff_src = gamma * rstd * e. This
    takes two kernel calls, or one if diff_src is the only result.

    Args:
        src: as in `batch_norm_forward_training`.
        diff_dst: with the shape and dtype of src.
        mean: batch_mean of the forward operator, shape (C,), any float dtype.
        variance: batch_variance of the forward operator (not the inverse standard deviation).
        gamma: shape (C,), any float dtype, or None for 1.
        epsilon: static, > 0.
        data_format: "NXC" for channels along the last axis, "NCX" for the second one.
        diff_gamma_and_beta: whether to return diff_gamma and diff_beta; None returns them if a
            gamma is given.
        use_global_stats: as given to the forward operator.
        fuse_norm_relu: as given to the forward operator; requires workspace or dst.
        fuse_norm_add_relu: as given to the forward operator; requires workspace or dst.
        workspace: that of the forward operator.
        dst: that of the forward operator; it is read only if there is no workspace.
        implementation: as in `jax_bnar.bn_add_relu`.

    Returns:
        TrainingBackward(diff_src, diff_gamma, diff_beta, diff_src_1).

    Raises:
        ValueError: a shape, or the value of an argument, does not fit, or a gamma is given with
            diff_gamma_and_beta=False. oneDNN ignores such a gamma, which cannot be intended.
        TypeError: a dtype, or the type of an argument, does not fit.
        NotImplementedError: implementation is "ffi", and the platform has no kernel.

    Examples:
        >>> import jax.numpy as jnp, jax_bnar
        >>> src = jnp.arange(6.0).reshape(3, 2)
        >>> mean, variance = src.mean(0), src.var(0)
        >>> gradients = jax_bnar.ops.batch_norm_training_backward(
        ...     src, jnp.square(src), mean, variance, jnp.ones(2), epsilon=1e-5
        ... )
        >>> [round(float(value), 3) for value in gradients.diff_beta]
        [20.0, 35.0]
    """
    src = check_x(_BACKWARD, src, "src")
    layout = check_data_format(_BACKWARD, data_format, _AXES, src.shape)
    dy = check_like(_BACKWARD, "diff_dst", diff_dst, src, "src")
    statistics = [
        check_statistic(_BACKWARD, name, vector, src, layout.axis, "src")
        for name, vector in (("mean", mean), ("variance", variance))
    ]
    scale = check_vector(_BACKWARD, "gamma", gamma, src, layout.axis, "src")
    value = check_epsilon(_BACKWARD, epsilon)
    _check_flags(_BACKWARD, fuse_norm_relu, fuse_norm_add_relu)
    wanted = _wants_diff_gamma_and_beta(gamma, diff_gamma_and_beta)
    gate, saved = _gate(workspace, dst, fuse_norm_relu or fuse_norm_add_relu, layout, src)
    common: dict[str, Any] = {
        "layout": layout,
        "implementation": resolve_implementation(_BACKWARD, implementation),
        "gate": gate,
    }
    with jax.named_scope(_BACKWARD):
        (x, dy), (mean_, var, scale) = align_operands(layout, (src, dy), (*statistics, scale))
        if gate == "y":
            (_, saved), _ = align_operands(layout, (x, saved), ())
        operands = (dy, x, saved, mean_, var, scale)
        options: dict[str, Any] = {"epsilon": value, "has_z": fuse_norm_add_relu, **common}
        diff_src, sums, dz = (
            _with_global_statistics(*operands, needs_sums=wanted, **options)
            if use_global_stats
            else _with_batch_statistics(*operands, **options)
        )
    if not wanted:
        return TrainingBackward(diff_src, None, None, dz)
    dtype = jnp.asarray(mean if gamma is None else gamma).dtype
    return TrainingBackward(diff_src, sums[0][0].astype(dtype), sums[1][0].astype(dtype), dz)


_Differentiated = tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]


def _with_batch_statistics(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    *,
    epsilon: float,
    has_z: bool,
    **common: Any,
) -> _Differentiated:
    """(diff_src, (diff_gamma, diff_beta), diff_src_1); the same call gives the sums at no cost."""
    zero = jnp.zeros_like(mean)
    (dx,), (dscale,), dbias, dz = primitive.OPERATIONS[1].backward(
        *(dy, (x,), saved, (Statistics(mean, var),), (Affine(scale, None),)),
        (Statistics(zero, zero),),
        epsilon=epsilon,
        has_z=has_z,
        **common,
    )
    return dx, (dscale, dbias), dz


def _with_global_statistics(
    dy: jax.Array,
    x: jax.Array,
    saved: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    *,
    epsilon: float,
    has_z: bool,
    needs_sums: bool,
    **common: Any,
) -> _Differentiated:
    """The same for statistics that are constants; diff_src then requires no sums."""
    rstd = reference.reciprocal_std(var, epsilon)
    sums: tuple[jax.Array, ...] = ()
    dz = None
    if needs_sums or has_z:
        dbias, (sum_e_centred,), dz = primitive.OPERATIONS[1].backward_reduce(
            *(dy, (x,), saved, (Statistics(mean, None),), (Affine(None, None),)),
            epsilon=epsilon,
            has_z=has_z,
            **common,
        )
        sums = rstd * sum_e_centred, dbias
    zero = jnp.zeros_like(mean)
    (dx,) = primitive.OPERATIONS[1].backward_apply(
        *(dy, (x,), saved, (Statistics(mean, var),), (Affine(scale, None),)),
        (Coefficients(zero, zero),),
        epsilon=epsilon,
        **common,
    )
    return dx, sums, dz


def _forward_operands(
    function: str,
    src: Any,
    mean: Any,
    variance: Any,
    gamma: Any,
    beta: Any,
    src_1: Any,
    epsilon: Any,
    data_format: Any,
    relu: bool,
    add_relu: bool,
    implementation: Implementation,
) -> tuple[tuple[Any, ...], Config]:
    """(src, src_1, affine, statistics), checked and aligned, and the static config."""
    src = check_x(function, src, "src")
    layout = check_data_format(function, data_format, _AXES, src.shape)
    _check_flags(function, relu, add_relu)
    if add_relu and src_1 is None:
        raise TypeError(f"{function}: fuse_norm_add_relu adds src_1, which must be an array.")
    if src_1 is not None and not add_relu:
        raise ValueError(
            f"{function}: src_1 is added with fuse_norm_add_relu=True only; set that flag, or omit"
            " src_1."
        )
    z = None if src_1 is None else check_like(function, "src_1", src_1, src, "src")
    vectors = [
        check_vector(function, name, vector, src, layout.axis, "src")
        for name, vector in (("gamma", gamma), ("beta", beta))
    ]
    statistics = [
        check_statistic(function, name, vector, src, layout.axis, "src")
        for name, vector in (("mean", mean), ("variance", variance))
    ]
    config = Config(
        epsilon=check_epsilon(function, epsilon),
        activation="relu" if relu or add_relu else "none",
        save="mask",
        implementation=resolve_implementation(function, implementation),
        has_z=add_relu,
        layout=layout,
    )
    (src, z), aligned = align_operands(
        layout, (src, z), ((Affine(*vectors),), (Statistics(*statistics),))
    )
    return ((src,), z, *aligned), config


def _check_flags(function: str, relu: Any, add_relu: Any) -> None:
    for name, flag in (("fuse_norm_relu", relu), ("fuse_norm_add_relu", add_relu)):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{function}: {name} must be True or False, got {flag!r}.")
    if relu and add_relu:
        raise ValueError(
            f"{function}: fuse_norm_relu and fuse_norm_add_relu exclude each other; both apply a"
            " ReLU, the second one after it has added src_1."
        )


def _wants_diff_gamma_and_beta(gamma: Any, asked_for: bool | None) -> bool:
    if asked_for is None:
        return gamma is not None
    if gamma is not None and not asked_for:
        raise ValueError(
            f"{_BACKWARD}: with diff_gamma_and_beta=False oneDNN ignores gamma, and diff_src lacks"
            " its factor; pass gamma=None for that, or leave diff_gamma_and_beta out."
        )
    return asked_for


def _gate(
    workspace: Any, dst: Any, relu: bool, layout: ChannelLayout, src: jax.Array
) -> tuple[Gate, jax.Array | None]:
    """The gate, which says where backward finds the ReLU's sign, and the array with the sign."""
    if not relu:
        if workspace is not None or dst is not None:
            raise ValueError(
                f"{_BACKWARD}: workspace and dst are read with fuse_norm_relu or"
                " fuse_norm_add_relu only; set the flag of the forward operator, or omit them."
            )
        return "none", None
    if dst is not None:
        dst = check_like(_BACKWARD, "dst", dst, src, "src")
    if workspace is not None:
        return "mask", check_mask(_BACKWARD, "workspace", workspace, layout, src.shape)
    if dst is None:
        raise TypeError(
            f"{_BACKWARD}: with fuse_norm_relu or fuse_norm_add_relu one of workspace and dst must"
            " be an array."
        )
    return "y", check_like(_BACKWARD, "dst", dst, src, "src")
