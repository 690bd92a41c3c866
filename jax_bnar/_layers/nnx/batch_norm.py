"""The NNX layer; import it from `jax_bnar.nnx_layers`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes

from jax_bnar._base.config import Save
from jax_bnar._base.dtypes import without_x64
from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import ActivationLike, layer_activation
from jax_bnar._layers.call import LayerCall
from jax_bnar._layers.channel_view import channel_view
from jax_bnar._layers.checks import (
    check_flags_of_updates,
    check_initial,
    check_options,
    checked_mask,
    checked_mode,
    checked_norm,
    checked_residual,
    require_real,
)
from jax_bnar._layers.prepared import PreparedCall
from jax_bnar._layers.promotion import scalar_of
from jax_bnar._layers.statistics import (
    BatchStatistics,
    check_momentum,
    running_average,
    unbiased,
)


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` on the fused operators, with an optional fused ReLU and residual.

        y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    This is a subclass of `nnx.BatchNorm` with the same arguments, attributes, state (`scale` and
    `bias` are `nnx.Param`, `mean` and `var` are `nnx.BatchStat`) and metadata; `train()`, `eval()`,
    `nnx.view` and filters by type work as before. Additional arguments default to NNX's behaviour.
    There are three modes:

    - training, `train()`: batch statistics; the running statistics become
      `momentum*old + (1-momentum)*batch`.
    - batch statistics without an update: training with `update_batch_stats=False`, an attribute
      that `set_attributes` and `nnx.view` can set.
    - evaluation, `eval()`: normalises with the running statistics.

    As in NNX, no gradient flows through the running statistics. The result has dtype `dtype` or, if
    that is None, the promotion of x, the parameters, the running statistics (so at least float32)
    and the residual.

    There is one deliberate difference. If `dtype` is narrow, NNX rounds x, the running statistics,
    scale and bias to it before it computes; in bfloat16, for values with mean 3 and standard
    deviation 0.1, this causes errors of 0.13 in evaluation. Here the statistics stay in float32 and
    the result is rounded once, as in Linen. If you pass your own `promote_dtype`, it is called and
    its results are used unchanged, so a function that does the same as NNX's also rounds like it.

    Complex x, which `nnx.BatchNorm` takes, is refused. `use_fast_variance` has no effect: the
    variance is always computed from deviations.

    Args:
        num_features: number of channels.
        activation: "none" (or None), a name or function that `jax_bnar.bn_act` takes, such as
            "relu" or `jax.nn.silu`, which is fused, or any other function of an array, which plain
            JAX applies after the residual has been added. A module, such as `nnx.PReLU`,
            becomes part of the layer's state.
        unbiased_running_var: whether the running variance is updated with `var * n/max(n-1, 1)`, as
            in PyTorch and cuDNN. The output does not change.
        num_groups: number of ghost batches. The leading axis is split into this many equal groups,
            each normalised with its own statistics. The running statistics are updated with the
            averages over the groups.
        save: where backward finds the sign of the ReLU after a residual, "y" or "mask": see
            `jax_bnar.bn_add_relu`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu`.
        update_batch_stats: whether training updates the running statistics.
        mean_init: initializer of the running mean; None is NNX's zeros.
        var_init: initializer of the running variance; None is NNX's ones.
        rngs: as in `nnx.BatchNorm`.
        **fields: the other arguments of `nnx.BatchNorm`.

    Raises:
        ValueError, TypeError: `activation`, `save`, `num_groups`, `implementation`, a flag or what
            an initializer returns is invalid.
    """

    def __init__(
        self,
        num_features: int,
        *,
        activation: ActivationLike = "none",
        unbiased_running_var: bool = False,
        num_groups: int = 1,
        save: Save = "y",
        implementation: Implementation = None,
        update_batch_stats: bool = True,
        mean_init: Callable[..., Any] | None = None,
        var_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **fields: Any,
    ) -> None:
        super().__init__(num_features, rngs=rngs, **fields)
        for name, running, given in (("mean", self.mean, mean_init), ("var", self.var, var_init)):
            if given is not None:
                old = running[...]
                value = given(rngs.params(), old.shape, old.dtype)
                check_initial(f"{name}_init", np.shape(value), old.shape)
                running[...] = value
        self.activation: ActivationLike = stored_activation(activation)
        self.unbiased_running_var = unbiased_running_var
        self.num_groups = check_options("BatchNorm", save, implementation, num_groups)
        self.save: Save = save
        self.implementation: Implementation = implementation
        self.update_batch_stats = update_batch_stats
        check_flags_of_updates(self)

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
            use_running_average: takes precedence over the attribute, also over that of a
                `Shortcut`.
            mask: broadcasts to x. Only elements where it is True count in the statistics; devices
                are weighted by their numbers of such elements. All elements are normalised. The
                statistics take two passes over copies of x, see `jax_bnar.batch_statistics`. A
                channel without any such element becomes NaN. It holds for a `Shortcut` as well.
            residual: added before the activation: an array with the shape of x, or a `Shortcut`.

        Returns:
            y, with the shape of x.

        Raises:
            ValueError: the mode is not set, or a shape or the value of an argument is invalid.
            TypeError: the type of an argument is invalid, or x or the dtype of the result is
                complex.
            NameError: `axis_name` does not name a mapped axis in scope.
            NotImplementedError: `implementation` is "ffi", and the platform has no kernel.
        """
        return self._run(x, use_running_average, mask=mask, residual=residual)

    # `nnx.tabulate` jits every method whose name has no underscore, so what those take and return
    # must be pytrees of arrays and modules, which activations and prepared calls are not.
    def _run(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: Any = None,
        residual: Any = None,
        activation: ActivationLike = None,
    ) -> jax.Array:
        """The call, with another activation than the layer's unless it is None."""
        x = jnp.asarray(x)
        mask = checked_mask(mask, x)
        options: dict[str, Any] = {"activation": activation}
        if isinstance(residual, Shortcut):
            norm = checked_norm(residual.norm, BatchNorm, "nnx_layers")
            shortcut = norm._prepared(residual.x, use_running_average)
            options["residual_dtype"] = shortcut.result
            return self._prepared(x, use_running_average, **options).join(shortcut, mask)
        residual = checked_residual(residual, x)
        options["residual_dtype"] = None if residual is None else residual.dtype
        return self._prepared(x, use_running_average, **options).run(residual, mask)

    def _prepared(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        residual_dtype: Any = None,
        activation: ActivationLike = None,
    ) -> PreparedCall:
        """The call, not yet run.

        `residual_dtype` is the dtype of the residual that this call will get, if it gets one.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "BatchNorm: use_running_average is None; pass it to the constructor or to the call,"
                " or use model.train(), model.eval() or nnx.view(model, use_running_average=...)."
            )
        use_running_average = checked_mode("use_running_average", use_running_average)
        check_flags_of_updates(self)
        call = LayerCall.of(self)
        if activation is not None:
            call = dataclasses.replace(
                call, activation=layer_activation("BatchNorm", "activation", activation)
            )
        check_momentum("momentum", self.momentum)
        x = jnp.asarray(x)
        self._check_features(x)

        scale, bias = (None if v is None else v[...] for v in (self.scale, self.bias))
        mean, var = self.mean[...], self.var[...]
        inferred: tuple[Any, ...] = (x, mean, var, scale, bias)
        with jax.numpy_dtype_promotion("standard"):
            if self.promote_dtype is not dtypes.promote_dtype:
                x, mean, var, scale, bias = self.promote_dtype(
                    (x, mean, var, scale, bias), dtype=self.dtype
                )
                inferred = (x, scale, bias)
            result = without_x64(
                dtypes.canonicalize_dtype(*inferred, scalar_of(residual_dtype), dtype=self.dtype)
            )
        require_real(x, result, "flax.nnx.BatchNorm")
        given = (mean, var) if use_running_average else None
        return PreparedCall(call, x, scale, bias, given, result, self._update)

    def set_view(
        self, use_running_average: bool | None = None, update_batch_stats: bool | None = None
    ) -> None:
        """Sets what `nnx.view` sets. `nnx.view_info` parses this docstring and needs two spaces.

        Args:
          use_running_average: evaluation (True) or training (False).
          update_batch_stats: whether training updates the running statistics.
        """
        super().set_view(use_running_average=use_running_average)
        if update_batch_stats is not None:
            self.update_batch_stats = update_batch_stats

    def _update(self, statistics: BatchStatistics) -> None:
        if not self.update_batch_stats:
            return
        var = unbiased(statistics) if self.unbiased_running_var else statistics.var
        for running, batch in ((self.mean, statistics.mean), (self.var, var)):
            old = running[...]
            new = running_average(old, batch, self.momentum, dtype=np.dtype(np.float32))
            running[...] = jax.lax.stop_gradient(new.astype(old.dtype))

    def _check_features(self, x: jax.Array) -> None:
        features = channel_view(self.axis, x.shape).features
        if math.prod(features) != self.num_features:
            raise ValueError(
                f"BatchNorm: x of shape {x.shape} has {math.prod(features)} features along axis"
                f" {self.axis}, but the layer was made for num_features={self.num_features}."
            )


class Shortcut(NamedTuple):
    """The `BatchNorm` of a block's shortcut and its input, as the residual of another `BatchNorm`.

    The two norms, the addition and an activation become one call of `jax_bnar.dual_bn_act`, where
    both norms have the same options. An activation that is not fused follows as plain JAX.

    Attributes:
        norm: the norm of the shortcut, without an activation.
        x: its input.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_bnar.nnx_layers import BatchNorm, Shortcut
        >>> last = BatchNorm(3, activation="relu", rngs=nnx.Rngs(0))
        >>> shortcut = BatchNorm(3, rngs=nnx.Rngs(0))
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> last(x, residual=Shortcut(shortcut, 2 * x)).shape
        (4, 3)
    """

    norm: BatchNorm
    x: jax.Array


def stored_activation(activation: Any) -> ActivationLike:
    """The validated activation, as a string if it has a name."""
    given = layer_activation("BatchNorm", "activation", activation)
    is_named = given == layer_activation("BatchNorm", "activation", given.fused)
    return given.fused if is_named else activation
