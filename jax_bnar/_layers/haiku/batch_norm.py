"""The Haiku layer; import it from `jax_bnar.haiku_layers`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import NONE, ActivationLike, layer_activation
from jax_bnar._layers.call import LayerCall
from jax_bnar._layers.channel_view import feature_axes
from jax_bnar._layers.checks import (
    check_names_in_scope,
    check_options,
    checked_mode,
    checked_norm,
    checked_residual,
    require_real,
)
from jax_bnar._layers.haiku.affine import Affine, PreparedAffine
from jax_bnar._layers.prepared import PreparedCall
from jax_bnar._layers.promotion import promoted
from jax_bnar._layers.statistics import BatchStatistics, check_momentum
from jax_bnar._operators.validation import check_epsilon

_Initializer = Callable[..., Any]


class BatchNorm(hk.BatchNorm):
    """`haiku.BatchNorm` on the fused operators, with an optional fused ReLU and residual.

        y = act(scale * (inputs - mean) / sqrt(var + eps) + offset + residual)

    This is a subclass of `haiku.BatchNorm` with the same arguments, call, name (`batch_norm`),
    parameters (`scale`, `offset`) and state (`counter`, `hidden` and `average` of `mean_ema` and
    `var_ema`), with their shapes and dtypes, so checkpoints are interchangeable. Additional
    arguments default to Haiku's behaviour. There are three modes:

    - `is_training=True`: statistics of the batch, one call of the operator forward and one
      backward, as in `jax_bnar.bn_add_relu`. They enter `hk.ExponentialMovingAverage`, with the
      population variance: `hidden = decay*hidden + (1-decay)*batch`, and
      `average = hidden / (1 - decay**counter)`, which is not biased towards its initial zero.
    - `is_training=False, test_local_stats=True`: the same without an update.
    - otherwise: the averages normalise, in one pass.

    The result has the promotion of the dtypes of inputs, scale, offset and residual, as in Haiku.
    The operator computes in float32 or wider and rounds once; Haiku rounds every step to the dtype
    of inputs. The variance is computed from deviations, whereas Haiku's `E[x^2] - E[x]^2` has no
    correct digit if the mean is a thousand times the standard deviation. Parameters and averages
    that `init` creates have the dtype of inputs, as in Haiku; `hk.mixed_precision` changes that.

    Complex inputs, which `haiku.BatchNorm` takes, are refused, and so is `eps=0`.

    Args:
        create_scale: whether there is a parameter `scale`.
        create_offset: whether there is a parameter `offset`.
        decay_rate: weight of the old value in the averages, from 0 to 1.
        eps: added to the variance; static, > 0.
        scale_init: initializer of the scale.
        offset_init: initializer of the offset.
        axis: the axes over which statistics are computed; None for all but that of the channels.
            Features that are not adjacent cost a transposition.
        cross_replica_axis: name of a mapped axis (`vmap`, `pmap`, `shard_map`), or several names,
            over which statistics are computed, as `axis_name` in `jax_bnar.bn_add_relu`.
        cross_replica_axis_index_groups: groups of indices within that axis.
        data_format: where the channels are, such as "channels_last" or "NCHW".
        name: the name of the module.
        activation: "none" (or None), a name or function that `jax_bnar.bn_act` takes, such as
            "relu" or `jax.nn.silu`, which is fused, or any other function of an array, which plain
            JAX applies after the residual has been added.
        save: where backward finds the sign of the ReLU after a residual, "y" or "mask": see
            `jax_bnar.bn_add_relu`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu`.

    Raises:
        ValueError: as `haiku.BatchNorm`, decay_rate does not lie in [0, 1], or the activation has
            an unknown name.
        TypeError: decay_rate is no number, or the activation is not a function.

    Arguments and states are those of Haiku, by the authors of dm-haiku.
    """

    def __init__(
        self,
        create_scale: bool,
        create_offset: bool,
        decay_rate: float,
        eps: float = 1e-5,
        scale_init: _Initializer | None = None,
        offset_init: _Initializer | None = None,
        axis: Sequence[int] | None = None,
        cross_replica_axis: str | Sequence[str] | None = None,
        cross_replica_axis_index_groups: Sequence[Sequence[int]] | None = None,
        data_format: str = "channels_last",
        name: str | None = None,
        *,
        activation: ActivationLike = "none",
        save: Save = "y",
        implementation: Implementation = None,
    ) -> None:
        super().__init__(
            create_scale,
            create_offset,
            decay_rate,
            eps,
            scale_init,
            offset_init,
            axis,
            cross_replica_axis,
            cross_replica_axis_index_groups,
            data_format,
            name,
        )
        check_momentum("decay_rate", decay_rate)
        check_epsilon("BatchNorm", eps, "eps")
        layer_activation("BatchNorm", "activation", activation)
        check_options("BatchNorm", save, implementation)
        self.activation: ActivationLike = activation
        self.save: Save = save
        self.implementation: Implementation = implementation

    def __call__(
        self,
        inputs: Any,
        is_training: bool,
        test_local_stats: bool = False,
        scale: Any = None,
        offset: Any = None,
        *,
        residual: Any = None,
    ) -> jax.Array:
        """Normalises inputs.

        Args:
            inputs: any shape that has the axes.
            is_training: whether statistics of the batch normalise and enter the averages.
            test_local_stats: whether statistics of the batch normalise if `is_training` is False.
            scale: without `create_scale`; broadcasts to inputs. One that varies along an axis of
                the statistics, as in conditional normalisation, is not fused: plain JAX applies
                scale, offset, residual and activation to the result of the operator.
            offset: without `create_offset`; as scale.
            residual: added before the activation; has the shape of inputs. If no operator
                fuses the activation, plain JAX adds it after the rounding. A `Shortcut` stands for
                another norm whose result is added.

        Returns:
            y, with the shape of inputs.

        Raises:
            ValueError: scale or offset is given although the module creates it, a shape or the
                value of an argument is invalid, or there are no averages yet.
            NameError: `cross_replica_axis` does not name a mapped axis in scope.
            TypeError: the type of an argument is invalid, or inputs are complex.
        """
        x = jnp.asarray(inputs)
        mode = (
            checked_mode("is_training", is_training),
            checked_mode("test_local_stats", test_local_stats),
        )
        if isinstance(residual, Shortcut):
            norm = checked_norm(residual.norm, BatchNorm, "haiku_layers")
            found: list[PreparedAffine] = []
            norm._as_shortcut(jnp.asarray(residual.x), *mode, found)
            (shortcut,) = found
            own = _prepared(self, x, *mode, scale, offset, residual_dtype=shortcut.call.result)
            return own.join(shortcut)
        residual = checked_residual(residual, x)
        dtype = None if residual is None else residual.dtype
        return _prepared(self, x, *mode, scale, offset, residual_dtype=dtype).run(residual)

    # Haiku enters the name of a module, which its parameters need, when one of its methods is
    # called. Haiku's interceptors and tables see each such call, and expect arrays to go in and
    # out, so the prepared call takes another way.
    def _as_shortcut(
        self,
        inputs: jax.Array,
        is_training: bool,
        test_local_stats: bool,
        found: list[PreparedAffine],
    ) -> jax.Array:
        """Appends the call of these inputs, not yet run, to `found`."""
        found.append(_prepared(self, inputs, is_training, test_local_stats))
        return inputs


class Shortcut(NamedTuple):
    """The `BatchNorm` of a block's shortcut and its input, as the residual of another `BatchNorm`.

        y = bn(x1, is_training, residual=Shortcut(other_bn, x2))
        # y = act(batch_norm(x1) + other_batch_norm(x2))

    The two norms and the addition are one call of `jax_bnar.dual_bn_act` if the first norm has an
    activation that the operators have and the second none, and their other options and the shapes
    agree; otherwise the second norm runs first. Both have the same `is_training` and
    `test_local_stats`, and both update their averages.

    Haiku numbers modules in the order of their construction. Construct the two norms in the order
    in which the network had them, or pass their names.

    Attributes:
        norm: a `jax_bnar.haiku_layers.BatchNorm`.
        x: its inputs, with the shape of the other norm's.
    """

    norm: BatchNorm
    x: jax.Array


def _prepared(
    layer: BatchNorm,
    x: jax.Array,
    is_training: bool,
    test_local_stats: bool,
    scale: Any = None,
    offset: Any = None,
    *,
    residual_dtype: Any = None,
) -> PreparedAffine:
    """The call of a layer, not yet run."""
    for name, given, created in (
        ("scale", scale, layer.create_scale),
        ("offset", offset, layer.create_offset),
    ):
        if created and given is not None:
            raise ValueError(
                f"BatchNorm: {name} was given to a module with create_{name}=True, which has"
                f" its own; leave {name} out, or pass create_{name}=False."
            )
    axes = range(x.ndim) if layer.axis is None else layer.axis
    reduced = feature_axes(tuple(axes), x.shape)
    if layer.axis is None:
        (channel,) = feature_axes(layer.channel_index, x.shape)
        axes = reduced = tuple(axis for axis in reduced if axis != channel)
    features = tuple(axis for axis in range(x.ndim) if axis not in reduced)

    given = None
    if not (is_training or test_local_stats):
        given = layer.mean_ema.average, layer.var_ema.average
    else:
        check_names_in_scope(
            layer.cross_replica_axis, layer.cross_replica_axis_index_groups, "cross_replica_axis"
        )
    # As in Haiku, an axis that is given as a negative number stays in the parameters.
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    if layer.create_scale:
        scale = hk.get_parameter("scale", shape, x.dtype, layer.scale_init)
    if layer.create_offset:
        offset = hk.get_parameter("offset", shape, x.dtype, layer.offset_init)
    affine = Affine.of(x.shape, features, scale, offset)

    result = promoted(x.dtype, *affine.dtypes)
    if residual_dtype is not None:
        result = promoted(result, residual_dtype)
    if not jnp.issubdtype(result, jnp.inexact):
        result = np.dtype(np.float32)
    require_real(x, result, "haiku.BatchNorm")
    activation = layer_activation("BatchNorm", "activation", layer.activation)
    options = LayerCall(
        axis=features,
        epsilon=layer.eps,
        activation=activation if affine.is_per_feature else NONE,
        num_groups=1,
        save=layer.save,
        implementation=layer.implementation,
        axis_name=layer.cross_replica_axis,
        axis_index_groups=layer.cross_replica_axis_index_groups,
    )

    def update(statistics: BatchStatistics) -> None:
        if is_training:
            kept = tuple(1 if axis in reduced else size for axis, size in enumerate(x.shape))
            dtype = jax.eval_shape(jnp.mean, x).dtype  # a float, of integers too
            # `hk.ExponentialMovingAverage` promotes implicitly.
            with jax.numpy_dtype_promotion("standard"):
                layer.mean_ema(statistics.mean.reshape(kept).astype(dtype))
                layer.var_ema(statistics.var.reshape(kept).astype(dtype))

    call = PreparedCall(options, x, *affine.vectors, given, result, update)
    return PreparedAffine(call, affine, activation)
