"""The Linen layer; import it from `jax_bnar.flax_layers`."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes

from jax_bnar._layers.activation import ActivationLike
from jax_bnar._layers.call import LayerCall, checked_mask, checked_residual, require_real
from jax_bnar._layers.channel_view import channel_view
from jax_bnar._layers.promotion import promoted
from jax_bnar._layers.statistics import running_average, unbiased

# What `nn.BatchNorm` of the Flax that this was written for has; a newer one may have more.
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
# Looked up once: someone may put our layer in the place of `nn.BatchNorm`.
_UNKNOWN_FIELDS: Final = tuple(
    field for field in dataclasses.fields(nn.BatchNorm) if field.name not in _KNOWN_FIELDS
)


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` on the fused operators, with ReLU and residual taken in.

        y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    per channel. A subclass of `flax.linen.BatchNorm`, with its fields, call, errors, dtype rules
    and variables (`params/{scale, bias}`, `batch_stats/{mean, var}`), so checkpoints fit both ways;
    what is new has a default that changes nothing. There are three modes:

    - training: statistics of the batch. With `batch_stats` mutable the running statistics become
      `momentum*old + (1-momentum)*batch` (not during `init`).
    - statistics of the batch without an update: the same call with `batch_stats` immutable, where
      Flax raises an error.
    - evaluation: `use_running_average=True` normalises with the running statistics.

    The result has dtype `dtype`, or, where that is None, the promotion of x, scale, bias and
    residual: bfloat16 x with float32 parameters gives float32, as in Flax. The operator runs in the
    widest of these dtypes and rounds once, so

    - a result wider than x costs a widened copy of x (exact); set `dtype=x.dtype` to avoid it;
    - a result narrower than x is computed in the dtype of x, then rounded. Its gradient then keeps
      y in the wide dtype, which `save="mask"` avoids.

    Complex x is not supported. Integers are computed in float32.

    Beware of names where a norm, an addition and a ReLU become one call. Linen numbers modules in
    the order of their construction, and a residual has to exist before the call that adds it: where
    the norm of the shortcut used to come after the last one of the block, the two swap their names.
    With equal shapes an old checkpoint then loads without an error, and is wrong. Pass the old
    names, to these two and to the norms that the module constructs after them:

        shortcut = BatchNorm(name="BatchNorm_3")(shortcut)
        y = BatchNorm(name="BatchNorm_2", activation="relu")(y, residual=shortcut)

    Attributes:
        use_running_average: evaluation (True) or training (False), here or at the call.
        axis: the feature axis or axes. Feature axes that are not adjacent cost a transposition.
        momentum: weight of the old value in the running statistics.
        epsilon: added to the variance, static, > 0.
        dtype: of the result; None infers it.
        param_dtype: of scale and bias.
        use_bias: whether there is a bias.
        use_scale: whether there is a scale.
        bias_init: initializer of the bias.
        scale_init: initializer of the scale.
        axis_name: named axis (`vmap`, `pmap`, `shard_map`), or a tuple of them, over whose devices
            statistics are taken, as in `jax_bnar.bn_add_relu`. Leave it None under `jit`, where
            they are those of the whole array in any case. Ignored during `init`.
        axis_index_groups: groups of indices within that axis.
        use_fast_variance: no effect: the variance is always that of the deviations, as accurate as
            Flax with False.
        force_float32_reductions: False stores the running statistics in `param_dtype`, as Flax
            does; the arithmetic is in float32 (float64 for float64) all the same.
        activation: "none" (or None), "relu" (or `nn.relu`, `jax.nn.relu`), or another function of
            an array, which plain JAX applies to the result, residual included: that is not fused.
        unbiased_running_var: the running variance takes `var * n/max(n-1, 1)`, as in PyTorch and
            cuDNN, for checkpoints that go back there. The output does not change.
        num_groups: ghost batch: the leading axis splits into this many equal groups, normalised
            with statistics of their own. The running statistics take the mean over the groups, of
            the means and of the variances. Ignored during `init`.
        save: where backward finds the sign of the ReLU, "y" or "mask": see `jax_bnar.bn_add_relu`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu`.
    """

    # Inherited, in the same places; only the types are wider than in Flax.
    axis: Any = -1
    axis_name: Any = None
    # New, after all that are inherited.
    activation: ActivationLike = "none"
    unbiased_running_var: bool = False
    num_groups: int = 1
    save: str = "y"
    implementation: str | None = None

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
            use_running_average: as the field; exactly one of the two is given.
            mask: broadcasts to x; only elements where it is True count in the statistics, those of
                all devices by their number. This path is plain JAX, sharded by XLA, where the
                others run the kernels. A channel without any element becomes NaN.
            residual: added before the activation, with the shape of x. Unless that is ReLU, it is
                added after the rounding, by plain JAX.

        Returns:
            y, with the shape of x.

        Raises:
            ValueError: use_running_average is given twice or not at all, or a shape or the value of
                a field does not fit.
            TypeError: the type of a field does not fit.
            NotImplementedError: complex x, `implementation="ffi"` with a mask, or a field of a
                newer `flax.linen.BatchNorm` with another value than its default.
        """
        _require_known_fields(self)
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        # The input of `init` need not be a real batch, nor the named axis exist there (as in Flax).
        initializing = self.is_initializing()
        call = LayerCall.of(self)
        if initializing:
            call = call.without_groups()
        x = jnp.asarray(x)
        residual = checked_residual(residual, x)
        mask = checked_mask(mask, x)
        features = channel_view(self.axis, x.shape).features

        stored = jnp.float32 if self.force_float32_reductions else self.param_dtype
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, features, stored)
        running_var = self.variable("batch_stats", "var", jnp.ones, features, stored)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, features, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, features, self.param_dtype)

        with jax.numpy_dtype_promotion("standard"):
            result = dtypes.canonicalize_dtype(x, scale, bias, residual, dtype=self.dtype)
        require_real(x, result, "flax.linen.BatchNorm")
        arrays = (x, residual, scale, bias)
        if use_running_average:
            return call.with_given_statistics(
                *arrays, running_mean.value, running_var.value, result=result
            )
        y, statistics = call.with_batch_statistics(*arrays, mask=mask, result=result)
        if self.is_mutable_collection("batch_stats") and not initializing:
            var = unbiased(statistics) if self.unbiased_running_var else statistics.var
            statistic_dtype = self._statistic_dtype(x)
            for running, batch in ((running_mean, statistics.mean), (running_var, var)):
                running.value = running_average(
                    running.value, batch, self.momentum, dtype=statistic_dtype
                )
        return y

    def _statistic_dtype(self, x: jax.Array) -> np.dtype:
        """The dtype of batch statistics in Flax, which decides that of the running ones."""
        dtype = x.dtype if self.dtype is None else self.dtype
        if self.force_float32_reductions or not jnp.issubdtype(dtype, jnp.inexact):
            return promoted(dtype, np.float32)
        return np.dtype(dtype)


def _require_known_fields(layer: nn.BatchNorm) -> None:
    """A field that Flax adds some day must not be without effect in silence."""
    for field in _UNKNOWN_FIELDS:
        if getattr(layer, field.name) != field.default:
            raise NotImplementedError(
                f"BatchNorm: {field.name} is a field of flax.linen.BatchNorm that jax_bnar does not"
                f" know; leave it at its default, {field.default!r}, or use flax.linen.BatchNorm."
            )
