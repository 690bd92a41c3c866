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
from jax.typing import ArrayLike

from jax_bnar import primitive, reference
from jax_bnar._autodiff.inference import inference
from jax_bnar._autodiff.training import training
from jax_bnar._base.implementation import Implementation, resolve_implementation
from jax_bnar._base.inputs import Affine, Coefficients, Statistics
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
from jax_bnar.ops._arguments import check_data_format, moved
from jax_bnar.ops._onednn_arguments import (
    AXES,
    BACKWARD,
    check_relu_flags,
    forward_operands,
    gate_and_saved,
    wants_diff_gamma_and_beta,
)

DataFormat = Literal["NXC", "NCX"]

_TRAINING = "batch_norm_forward_training"
_INFERENCE = "batch_norm_inference"


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
    check_flag(_TRAINING, "use_global_stats", use_global_stats)
    operands, config = forward_operands(
        *(_TRAINING, src, mean, variance, gamma, beta, src_1),
        *(epsilon, data_format, fuse_norm_relu, fuse_norm_add_relu, implementation),
    )
    mean_dtype, variance_dtype = jnp.asarray(mean).dtype, jnp.asarray(variance).dtype
    with jax.named_scope(_TRAINING):
        *tensors, ((old_mean, old_variance),) = operands
        has_workspace = config.activation == "relu"
        if use_global_stats:
            dst, workspace = inference(*operands, config, has_workspace)
            given = old_mean[0].astype(mean_dtype), old_variance[0].astype(variance_dtype)
            return ForwardTraining(dst, given[0], given[1], given[0], given[1], workspace)
        dst, batch, workspace = training(*tensors, config, has_workspace)
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
    operands, config = forward_operands(
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
    src = check_x(BACKWARD, src, "src")
    layout = check_data_format(BACKWARD, data_format, AXES, src.shape)
    dy = check_like(BACKWARD, "diff_dst", diff_dst, src, "src")
    statistics = [
        check_statistic(BACKWARD, name, vector, src, layout.axis, "src")
        for name, vector in (("mean", mean), ("variance", variance))
    ]
    scale = check_vector(BACKWARD, "gamma", gamma, src, layout.axis, "src")
    value = check_epsilon(BACKWARD, epsilon)
    check_flag(BACKWARD, "use_global_stats", use_global_stats)
    relu, add_relu = check_relu_flags(BACKWARD, fuse_norm_relu, fuse_norm_add_relu)
    wanted = wants_diff_gamma_and_beta(gamma, diff_gamma_and_beta)
    gate, saved = gate_and_saved(workspace, dst, relu or add_relu, layout, src)
    common: dict[str, Any] = {
        "layout": layout,
        "implementation": resolve_implementation(BACKWARD, implementation),
        "gate": gate,
    }
    with jax.named_scope(BACKWARD):
        (x, dy), (mean_, var, scale) = align_operands(layout, (src, dy), (*statistics, scale))
        if gate == "y":
            (_, saved), _ = align_operands(layout, (x, saved), ())
        operands = (dy, x, saved, mean_, var, scale)
        options: dict[str, Any] = {"epsilon": value, "has_z": add_relu, **common}
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
