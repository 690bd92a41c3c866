"""The Linen layer; import it from `jax_bnar.flax_layers`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes

from jax_bnar._base.config import Save
from jax_bnar._base.dtypes import without_x64
from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import ActivationLike
from jax_bnar._layers.call import LayerCall
from jax_bnar._layers.channel_view import channel_view
from jax_bnar._layers.checks import (
    check_flags_of_updates,
    check_initial,
    checked_mask,
    checked_mode,
    checked_residual,
    require_real,
)
from jax_bnar._layers.prepared import PreparedCall
from jax_bnar._layers.promotion import promoted, scalar_of
from jax_bnar._layers.statistics import (
    BatchStatistics,
    check_momentum,
    running_average,
    unbiased,
)

# The fields of `nn.BatchNorm` in the Flax that this was written for. A newer Flax may add some.
_KNOWN_FIELDS: Final = frozenset(
    {
        "use_running_average",
        "axis",
        "momentum",
        "epsilon",
        "dtype",
        "param_dtype",
        "use_bias",
        "use_scale",
        "bias_init",
        "scale_init",
        "axis_name",
        "axis_index_groups",
        "use_fast_variance",
        "force_float32_reductions",
        "parent",
        "name",
    }
)
# Looked up at import, because users may replace `nn.BatchNorm` by our layer.
_UNKNOWN_FIELDS: Final = tuple(
    field for field in dataclasses.fields(nn.BatchNorm) if field.name not in _KNOWN_FIELDS
)


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` on the fused operators, with an optional fused ReLU and residual.

        y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    This is a subclass of `flax.linen.BatchNorm` with the same fields, call, errors, dtype rules and
    variables (`params/{scale, bias}`, `batch_stats/{mean, var}`), so checkpoints are
    interchangeable. Additional fields default to Flax's behaviour. There are three modes:

    - training: batch statistics. The running statistics, whose collection `batch_stats` must be
      mutable, become `momentum*old + (1-momentum)*batch` (but not during `init`).
    - batch statistics without an update: training with `update_batch_stats=False`.
    - evaluation: `use_running_average=True` normalises with the running statistics.

    The result has dtype `dtype` or, if that is None, the promotion of x, scale, bias and residual:
    bfloat16 x with float32 parameters gives float32, as in Flax. The operator runs in the widest of
    these dtypes and rounds once. This has two consequences:

    - A result wider than x takes more memory than one of its dtype; set `dtype=x.dtype` to avoid
      it. x itself is read as it is. A widened copy of it (which is exact) is made only for another
      activation than ReLU, and where two norms are joined.
    - A result narrower than x is computed in the dtype of x and then rounded. For the gradient
      after a residual, y is kept in the wide dtype; `save="mask"` avoids that.

    Integers are computed in float32. Complex x, which `flax.linen.BatchNorm` takes, is refused.

    Beware of automatic names when you merge a norm, an addition and a ReLU into one call. Linen
    numbers modules in the order of their construction, and a residual must exist before the call
    that adds it. If the shortcut's norm used to be constructed after the last norm of the block,
    the two swap names. If their shapes are equal, an old checkpoint then loads without an error but
    gives wrong results. Pass the old names to these two norms, and to the norms that the module
    constructs after them:

        shortcut = BatchNorm(name="BatchNorm_3")(shortcut)
        y = BatchNorm(name="BatchNorm_2", activation="relu")(y, residual=shortcut)

    Attributes:
        use_running_average: evaluation (True) or training (False), here or at the call.
        axis: the feature axis or axes. Feature axes that are not adjacent cost a transposition.
        momentum: weight of the old value in the running statistics, from 0 to 1.
        epsilon: added to the variance; static, > 0.
        dtype: dtype of the result; None infers it.
        param_dtype: dtype of scale and bias.
        use_bias: whether there is a bias.
        use_scale: whether there is a scale.
        bias_init: initializer of the bias.
        scale_init: initializer of the scale.
        axis_name: name of a mapped axis (`vmap`, `pmap`, `shard_map`), or a tuple of names, over
            which statistics are computed, as in `jax_bnar.bn_add_relu`. Leave it None under `jit`
            alone, where statistics are always those of the whole array. Ignored during `init`.
        axis_index_groups: groups of indices within that axis. Without `axis_name`, where Flax
            ignores them, they are an error.
        use_fast_variance: no effect. The variance is always computed from deviations, as accurately
            as Flax does with False.
        force_float32_reductions: False stores the running statistics in `param_dtype`, as in Flax.
            The arithmetic still runs in float32 (float64 for float64 x).
        activation: "none" (or None), a name or function that `jax_bnar.bn_act` takes, such as
            "relu" or `jax.nn.silu`, which is fused, or any other function of an array, which plain
            JAX applies after the residual has been added.
        unbiased_running_var: whether the running variance is updated with `var * n/max(n-1, 1)`, as
            in PyTorch and cuDNN, for checkpoints that will be used there. The output does not
            change.
        num_groups: number of ghost batches. The leading axis is split into this many equal groups,
            each normalised with its own statistics. The running statistics are updated with the
            averages over the groups of their means and variances. Ignored during `init`.
        save: where backward finds the sign of the ReLU after a residual, "y" or "mask": see
            `jax_bnar.bn_add_relu`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu`.
        update_batch_stats: whether training updates the running statistics. If False, it neither
            changes `batch_stats` nor needs it to be mutable.
        mean_init: initializer of the running mean; None is Flax's zeros.
        var_init: initializer of the running variance; None is Flax's ones.
    """

    # Inherited fields, in the same positions; only their types are wider than in Flax.
    axis: Any = -1
    axis_name: Any = None
    # New fields, which must follow all inherited ones.
    activation: ActivationLike = "none"
    unbiased_running_var: bool = False
    num_groups: int = 1
    save: Save = "y"
    implementation: Implementation = None
    update_batch_stats: bool = True
    mean_init: Callable[..., Any] | None = None
    var_init: Callable[..., Any] | None = None

    @nn.compact
    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: Any = None,
        residual: Any = None,
    ) -> jax.Array:
        """Normalises x.

        Args:
            x: any shape that has the feature axes.
            use_running_average: like the field; exactly one of the two must be given.
            mask: broadcasts to x. Only elements where it is True count in the statistics; devices
                are weighted by their numbers of such elements. All elements are normalised. The
                statistics take two passes over copies of x, see `jax_bnar.batch_statistics`. A
                channel without any such element becomes NaN.
            residual: added before the activation; has the shape of x.

        Returns:
            y, with the shape of x.

        Raises:
            flax.errors.ModifyScopeVariableError: in training, `batch_stats` is not mutable: pass
                `mutable=["batch_stats"]` to `apply`, or `update_batch_stats=False` to the layer.
            ValueError: use_running_average is given twice or not at all, a shape or the value of a
                field is invalid, or x has other features than the variables.
            TypeError: the type of a field is invalid, or x or the dtype of the result is complex.
            NameError: `axis_name` does not name a mapped axis in scope.
            NotImplementedError: `implementation` is "ffi", and the platform has no kernel; or a
                field that a newer `flax.linen.BatchNorm` added is not at its default.
        """
        x = jnp.asarray(x)
        mask = checked_mask(mask, x)
        if isinstance(residual, PreparedCall):
            return prepared(self, x, use_running_average, residual.result).join(residual, mask)
        residual = checked_residual(residual, x)
        dtype = None if residual is None else residual.dtype
        return prepared(self, x, use_running_average, dtype).run(residual, mask)


class JoinedBatchNorm(BatchNorm):
    """The `BatchNorm` of a block's shortcut, whose result only the join with another one reads.

    Its `prepare` takes the place of `__call__`. It has a class of its own because Linen allows only
    one compact method in a class.
    """

    def __call__(self, *_: Any, **__: Any) -> jax.Array:
        raise NotImplementedError(
            "JoinedBatchNorm has no result of its own: call prepare, and pass what it returns to"
            " another BatchNorm as the residual."
        )

    @nn.compact
    def prepare(self, x: Any, use_running_average: bool | None = None) -> PreparedCall:
        """The call, to be passed to another layer as its residual."""
        return prepared(self, jnp.asarray(x), use_running_average, None)


def prepared(
    layer: BatchNorm, x: jax.Array, use_running_average: bool | None, residual_dtype: Any
) -> PreparedCall:
    """The call of a layer, in whose compact method this runs."""
    _require_known_fields(layer)
    check_momentum("momentum", layer.momentum)
    name = "use_running_average"
    for mode in (layer.use_running_average, use_running_average):
        if mode is not None:  # Before both: a residual in place of one is not "given twice".
            checked_mode(name, mode, ", and the number of features is read from x")
    use_running_average = bool(nn.merge_param(name, layer.use_running_average, use_running_average))
    check_flags_of_updates(layer)
    # As in Flax, `init` needs neither a real batch as input nor the named axis.
    initializing = layer.is_initializing()
    call = LayerCall.of(layer)
    if initializing:
        call = call.without_groups()
    features = channel_view(layer.axis, x.shape).features
    _require_features_of_variables(layer, x, features)

    # These come first, because a key for `mean_init` would change theirs, which are Flax's.
    scale = bias = None
    if layer.use_scale:
        scale = layer.param("scale", layer.scale_init, features, layer.param_dtype)
    if layer.use_bias:
        bias = layer.param("bias", layer.bias_init, features, layer.param_dtype)
    stored = jnp.float32 if layer.force_float32_reductions else layer.param_dtype
    running_mean, running_var = (
        layer.variable("batch_stats", name, _initial(layer, name, given, flax), features, stored)
        for name, given, flax in (
            ("mean", layer.mean_init, jnp.zeros),
            ("var", layer.var_init, jnp.ones),
        )
    )
    scale, bias = _as_flax_reads(layer, scale), _as_flax_reads(layer, bias)

    with jax.numpy_dtype_promotion("standard"):
        result = without_x64(
            dtypes.canonicalize_dtype(x, scale, bias, scalar_of(residual_dtype), dtype=layer.dtype)
        )
    require_real(x, result, "flax.linen.BatchNorm")

    def update(statistics: BatchStatistics) -> None:
        if initializing or not layer.update_batch_stats:
            return
        var = unbiased(statistics) if layer.unbiased_running_var else statistics.var
        statistic_dtype = _statistic_dtype(layer, x)
        for running, batch in ((running_mean, statistics.mean), (running_var, var)):
            running.value = running_average(
                running.value, batch, layer.momentum, dtype=statistic_dtype
            )

    # An empty batch has no statistics, but serves for `init` as well as any other.
    takes_running = use_running_average or (initializing and x.size == 0)
    given = None
    if takes_running:
        given = tuple(_as_flax_reads(layer, v.value) for v in (running_mean, running_var))
    return PreparedCall(call, x, scale, bias, given, result, update)


def _as_flax_reads(layer: BatchNorm, vector: Any) -> Any:
    """What Flax makes of a stored parameter or statistic, which may have another dtype."""
    if vector is None or layer.force_float32_reductions:
        return vector
    return jnp.asarray(vector, layer.param_dtype)


def _initial(
    layer: BatchNorm, name: str, given: Callable[..., Any] | None, flax: Callable[..., Any]
) -> Callable[..., Any]:
    """What makes a running statistic of a shape and a dtype."""
    if given is None:
        return flax  # It takes no key.

    def initial(shape: tuple[int, ...], dtype: Any) -> Any:
        value = given(layer.make_rng("params"), shape, dtype)
        check_initial(f"{name}_init", np.shape(nn.unbox(value)), shape)
        return value

    return initial


def _require_features_of_variables(
    layer: BatchNorm, x: jax.Array, features: tuple[int, ...]
) -> None:
    """Flax compares the shapes too, but its error does not mention the axis."""
    for collection, name in (("params", "scale"), ("params", "bias"), ("batch_stats", "mean")):
        if not layer.has_variable(collection, name):
            continue
        stored = np.shape(nn.unbox(layer.get_variable(collection, name)))
        if stored != features:
            raise ValueError(
                f"BatchNorm: x of shape {x.shape} has {_shape_text(features)} features along axis"
                f" {layer.axis}, but the layer's {name} was made for {_shape_text(stored)}. Pass"
                " the feature axis of x as axis (axis=1 for NCHW, axis=-1 for NHWC), or the"
                " variables of this network."
            )


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _statistic_dtype(layer: BatchNorm, x: jax.Array) -> np.dtype:
    """The dtype that Flax gives batch statistics, on which that of the running ones depends."""
    dtype = x.dtype if layer.dtype is None else layer.dtype
    if layer.force_float32_reductions or not jnp.issubdtype(dtype, jnp.inexact):
        return promoted(dtype, np.float32)
    return without_x64(dtype)


def _require_known_fields(layer: nn.BatchNorm) -> None:
    """Refuses to silently ignore a field that a newer Flax has added."""
    for field in _UNKNOWN_FIELDS:
        if getattr(layer, field.name) != field.default:
            raise NotImplementedError(
                f"BatchNorm: {field.name} is a field of flax.linen.BatchNorm that jax_bnar does not"
                f" support; leave it at its default, {field.default!r}, or use"
                " flax.linen.BatchNorm."
            )
