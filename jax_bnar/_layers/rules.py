"""What a layer does around the operators, for any neural-network library.

The operators know one channel axis and one dtype. The layers of Flax know several feature axes,
masks, named axes, and a result dtype of their own; the rules here lead from one to the other.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_bnar import reference
from jax_bnar._base.config import Activation
from jax_bnar._base.dtypes import SUPPORTED, accumulation_dtype
from jax_bnar._base.implementation import resolve_implementation
from jax_bnar._operators import api
from jax_bnar._operators.validation import check_epsilon, check_named_axes, check_operands
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.collectives import parts_of


class ChannelView(NamedTuple):
    """How an array with any number of feature axes is seen as one with a single channel axis.

    Adjacent feature axes merge in place, which moves no data; others are transposed to the end.
    Without an axis to reduce over, the view gets one of length 1.
    """

    features: tuple[int, ...]
    permutation: tuple[int, ...]
    permuted_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int

    def view(self, array: jax.Array) -> jax.Array:
        return array.transpose(self.permutation).reshape(self.shape)

    def restore(self, array: jax.Array) -> jax.Array:
        inverse = tuple(int(i) for i in np.argsort(self.permutation))
        return array.reshape(self.permuted_shape).transpose(inverse)


class BatchStatistics(NamedTuple):
    """Statistics of one batch, in the accumulation dtype.

    Attributes:
        mean: shape (C,), or (num_groups, C) where num_groups > 1.
        var: population variance, with the shape of mean.
        elements: number of elements behind each value: an integer, or an array that broadcasts.
    """

    mean: jax.Array
    var: jax.Array
    elements: jax.Array | int


def promoted(*dtypes: Any) -> np.dtype:
    """JAX's promotion of dtypes, even where the user has made implicit promotion an error."""
    with jax.numpy_dtype_promotion("standard"):
        result = np.dtype(dtypes[0])
        for dtype in dtypes[1:]:
            result = jnp.promote_types(result, dtype)
    return np.dtype(result)


def compute_dtype(*dtypes: Any) -> np.dtype:
    """The dtype in which an operator runs so that no operand loses a digit.

    The widest of the given dtypes; what the operators do not know (integers, float8) counts as
    float32, as in Flax.
    """
    return promoted(*(d if np.dtype(d) in SUPPORTED else np.float32 for d in dtypes))


def feature_axes(axis: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Non-negative, sorted feature axes without duplicates.

    Raises:
        TypeError: an axis is not an integer.
        ValueError: an axis is out of range.
    """
    ndim = len(shape)
    axes = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    try:
        axes = tuple(operator.index(a) for a in axes)
    except TypeError:
        raise TypeError(
            f"BatchNorm: axis must be an integer or a sequence of integers, got {axis!r}."
        ) from None
    if not all(-ndim <= a < ndim for a in axes):
        raise ValueError(
            f"BatchNorm: axis must lie in [{-ndim}, {ndim}) for x of shape {shape}, got {axis!r}."
        )
    return tuple(sorted({a % ndim for a in axes}))


def channel_view(axis: Any, shape: tuple[int, ...]) -> ChannelView:
    """The view of an array of this shape whose feature axes are `axis`."""
    features = feature_axes(axis, shape)
    reduced = tuple(a for a in range(len(shape)) if a not in features)
    channels = math.prod(shape[a] for a in features)
    if features and features == tuple(range(features[0], features[-1] + 1)):
        permutation = tuple(range(len(shape)))
        before, after = shape[: features[0]], shape[features[-1] + 1 :]
    else:
        permutation = reduced + features
        before, after = tuple(shape[a] for a in reduced), ()
    if not reduced:
        before = (1,)
    return ChannelView(
        features=tuple(shape[a] for a in features),
        permutation=permutation,
        permuted_shape=tuple(shape[a] for a in permutation),
        shape=(*before, channels, *after),
        axis=len(before),
    )


def normalise_with_batch_statistics(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    axis: int,
    epsilon: float,
    activation: Activation,
    num_groups: int,
    save: str,
    implementation: str | None,
    mask: jax.Array | None,
    axis_name: Any,
    axis_index_groups: Any,
) -> tuple[jax.Array, BatchStatistics]:
    """(y, statistics) of x with a single channel axis.

    One operator call; with a mask, which the operators do not know, plain JAX. Either way the
    statistics are those of the named axes' whole batch, by count.
    """
    if mask is None:
        options = {
            "epsilon": epsilon,
            "axis": axis,
            "axis_name": axis_name,
            "axis_index_groups": axis_index_groups,
            "num_groups": num_groups,
            "save": save,
            "implementation": implementation,
        }
        if activation == "none":
            y, mean, var = api.batch_norm(x, scale, bias, **options)
            y = _add(y, residual)
        elif residual is None:
            y, mean, var = api.bn_relu(x, scale, bias, **options)
        else:
            y, mean, var = api.bn_add_relu(x, residual, scale, bias, **options)
        elements: jax.Array | int = x.size // (x.shape[axis] * num_groups)
        if axis_name is not None:
            elements *= parts_of(*check_named_axes("BatchNorm", axis_name, axis_index_groups))
        return y, BatchStatistics(mean, var, elements)

    if resolve_implementation("BatchNorm", implementation) == "ffi":
        raise NotImplementedError(
            "BatchNorm: mask has no kernel yet, but implementation='ffi' asks for one;"
            " implementation=None computes it in plain JAX."
        )
    operands = check_operands(
        "BatchNorm", x, residual, scale, bias, axis=axis, num_groups=num_groups
    )

    def normalise(
        x: jax.Array, z: Any, scale: Any, bias: Any, mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        shape = operands.layout.canonical(x.shape)
        statistics = _collective_statistics(
            x.reshape(shape), mask.reshape(shape), axis_name, axis_index_groups
        )
        (y,) = reference.normalise(
            x.reshape(shape),
            None if z is None else z.reshape(shape),
            scale,
            bias,
            statistics.mean,
            statistics.var,
            epsilon=check_epsilon("BatchNorm", epsilon),
            activation=activation,
            save_mask=False,
        )
        return y.reshape(x.shape), *(jnp.asarray(s) for s in statistics)

    spec = jax.typeof(operands.x).sharding.spec
    vector = PartitionSpec(None, spec[axis])
    y, *statistics = with_automatic_axes(
        normalise, (spec, vector, vector, vector), *operands[:4], mask
    )
    if num_groups == 1:
        statistics = [s[0] for s in statistics]
    return y, BatchStatistics(*statistics)


def normalise_with_given_statistics(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    axis: int,
    epsilon: float,
    activation: Activation,
    implementation: str | None,
) -> jax.Array:
    """y of x with a single channel axis, in one operator call."""
    options = {"epsilon": epsilon, "axis": axis, "implementation": implementation}
    if activation == "none":
        return _add(api.batch_norm_inference(x, scale, bias, mean, var, **options), residual)
    if residual is None:
        return api.bn_relu_inference(x, scale, bias, mean, var, **options)
    return api.bn_add_relu_inference(x, residual, scale, bias, mean, var, **options)


def running_average(
    old: jax.Array,
    batch: jax.Array,
    momentum: float,
    *,
    dtype: np.dtype,
) -> jax.Array:
    """`momentum*old + (1-momentum)*batch`, where a leading group axis of `batch` is averaged.

    Args:
        old: the running statistic, any shape with C elements.
        batch: shape (C,) or (num_groups, C).
        momentum: weight of the old value.
        dtype: that of the batch statistic in Flax; the result has its promotion with old's dtype.
    """
    if batch.ndim == 2:
        batch = batch.mean(axis=0)
    result = promoted(old.dtype, dtype)
    wide = promoted(result, np.float32)
    new = momentum * old.astype(wide) + (1 - momentum) * batch.astype(wide).reshape(old.shape)
    return new.astype(result)


def unbiased(statistics: BatchStatistics) -> jax.Array:
    """The variance times n/max(n-1, 1), as PyTorch and cuDNN put it into running statistics."""
    var, elements = statistics.var, statistics.elements
    if isinstance(elements, int):
        return var * (elements / max(elements - 1, 1))
    elements = jnp.broadcast_to(elements, var.shape)
    return var * (elements / jnp.maximum(elements - 1, jnp.ones_like(elements)))


def _add(y: jax.Array, residual: jax.Array | None) -> jax.Array:
    return y if residual is None else y + residual


def _collective_statistics(
    x: jax.Array, mask: jax.Array | None, axis_name: Any, axis_index_groups: Any
) -> BatchStatistics:
    """Statistics of canonical x, (G, C) each, over its unmasked elements on all devices.

    Sums and counts are added up, so devices (or groups) with different counts weigh as they should.
    In two passes around a first estimate of the mean: E[x^2]-E[x]^2 would lose the variance where
    |mean| >> std.
    """
    wide = x.astype(accumulation_dtype(x.dtype))
    keep = jnp.ones(x.shape, bool) if mask is None else mask
    # Selected before any arithmetic: a masked NaN or Inf must not reach the gradient as 0*Inf.
    wide = jnp.where(keep, wide, jnp.zeros_like(wide))

    def across_devices(local: jax.Array) -> jax.Array:
        if axis_name is None:
            return local
        return jax.lax.psum(local, axis_name, axis_index_groups=axis_index_groups)

    def total(array: jax.Array) -> jax.Array:
        return across_devices(jnp.where(keep, array, jnp.zeros_like(array)).sum(axis=(1, 3)))

    def around(array: jax.Array, centre: jax.Array) -> jax.Array:
        return array - jnp.broadcast_to(centre[:, None, :, None], x.shape)

    # Counted in integers: a float32 sum of ones stops growing at 2^24.
    elements = across_devices(keep.sum(axis=(1, 3), dtype=jnp.int32)).astype(wide.dtype)
    estimate = jax.lax.stop_gradient(total(wide) / elements)
    # An Inf as centre would turn Inf-Inf into a NaN mean.
    estimate = jnp.where(jnp.isfinite(estimate), estimate, jnp.zeros_like(estimate))
    centred = around(wide, estimate)
    offset = total(centred) / elements
    # Not around the mean, whose rounding alone would show in a variance far below it.
    var = total(jnp.square(around(centred, offset))) / elements
    return BatchStatistics(estimate + offset, var, elements)
