"""The Equinox layer; import it from `jax_bnar.equinox_layers`."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import ActivationLike, layer_activation
from jax_bnar._layers.call import LayerCall
from jax_bnar._layers.checks import (
    check_names_in_scope,
    check_options,
    checked_mode,
    checked_norm,
    checked_residual,
    require_real,
)
from jax_bnar._layers.equinox import running
from jax_bnar._layers.prepared import PreparedCall
from jax_bnar._layers.promotion import promoted
from jax_bnar._layers.statistics import BatchStatistics, check_momentum
from jax_bnar._operators.named_axes import names_in_scope
from jax_bnar._operators.validation import check_epsilon


class BatchNorm(eqx.nn.BatchNorm):
    """`equinox.nn.BatchNorm` on the fused operators, with an optional fused ReLU and residual.

        y = act(weight * (x - mean) / sqrt(var + eps) + bias + residual)

    This is a subclass of `equinox.nn.BatchNorm` with the same arguments, call, parameters (`weight`
    and `bias`) and state, so what `eqx.tree_serialise_leaves` has written for one loads into the
    other. It is called under `jax.vmap(axis_name=...)`, as Equinox documents it: for one example,
    with channels first, and it returns y and the new state. Additional arguments default to
    Equinox's behaviour. mean and var depend on the mode:

    - `mode="batch"`, training: those of the batch. Under `vmap`, all examples are one call of the
      operator forward and one backward, as in `jax_bnar.bn_add_relu`. The state becomes
      `momentum*old + (1-momentum)*batch`, with the population variance, and counts the batches.
    - `mode="ema"`, training: the averages, into which the batch has just been mixed with the weight
      `1-momentum` (the first batch: 1). The statistics of the batch are computed in plain JAX,
      because no training operator normalises with other statistics than its own; one pass
      (`jax_bnar.bn_add_relu_inference`) normalises, adds and applies the ReLU. Gradients flow
      through the batch's share of the averages, as in Equinox. This saves less than "batch", which
      Equinox recommends for new networks.
    - inference: the averages. With `mode="batch"` Equinox divides both by
      `1 - momentum**(number of batches)`, and so does this layer.

    The result has the promotion of the dtypes of x, weight, bias, the residual and, where they
    normalise, the averages, as in Equinox: bfloat16 x with float32 parameters gives float32. x
    itself is read as it is; a widened copy of it is made only for another activation than ReLU, and
    where two norms are joined. The operator computes in float32 or wider and rounds once, whereas
    Equinox rounds every step to the dtype of x.

    Complex x, which `equinox.nn.BatchNorm` takes, is refused, and so is `eps=0`.

    Args:
        input_size: number of channels.
        axis_name: name of the mapped axis of the batch, or several names.
        eps: added to the variance; static, > 0.
        channelwise_affine: whether there are a weight and a bias.
        momentum: weight of the old value in the averages, from 0 to 1.
        inference: whether the averages normalise; `eqx.nn.inference_mode` sets it.
        dtype: dtype of weight, bias and averages; None is JAX's default.
        mode: "batch" or "ema"; Equinox warns if it is left out, and takes "ema".
        activation: "none" (or None), a name or function that `jax_bnar.bn_act` takes, such as
            "relu" or `jax.nn.silu`, which is fused, or any other function of an array, which plain
            JAX applies after the residual has been added. It is static, so a module with
            parameters, such as `eqx.nn.PReLU`, is refused.
        save: where backward finds the sign of the ReLU after a residual, "y" or "mask": see
            `jax_bnar.bn_add_relu`.
        implementation: None, "ffi" or "xla", as in `jax_bnar.bn_add_relu`.

    Raises:
        ValueError: the activation has an unknown name, or `mode` is neither "ema" nor "batch".
        TypeError: the activation is not a function, or it contains arrays.

    Modes and state are those of Equinox, by P. Kidger and others.
    """

    # A string or a function, so static: the leaves are those of Equinox's layer.
    activation: ActivationLike = eqx.field(static=True)
    save: Save = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable | Sequence[Hashable],
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool = False,
        dtype: Any = None,
        mode: Literal["ema", "batch", "legacy"] = "legacy",
        *,
        activation: ActivationLike = "none",
        save: Save = "y",
        implementation: Implementation = None,
    ) -> None:
        super().__init__(
            input_size, axis_name, eps, channelwise_affine, momentum, inference, dtype, mode
        )
        layer_activation("BatchNorm", "activation", activation)
        if any(map(eqx.is_array, jax.tree.leaves(activation))):
            raise TypeError(
                f"BatchNorm: activation must be a function without arrays, got {activation!r}: its"
                " parameters would not be trained; leave activation out, and apply it to y."
            )
        check_options("BatchNorm", save, implementation)
        self.activation = activation
        self.save = save
        self.implementation = implementation

    def __call__(
        self,
        x: Any,
        state: eqx.nn.State,
        *,
        key: Any = None,
        inference: bool | None = None,
        residual: Any = None,
    ) -> tuple[jax.Array, eqx.nn.State]:
        """Normalises x.

        Args:
            x: one example, shape (input_size, dim_1, ..., dim_N).
            state: the state of the model.
            key: ignored, as in Equinox.
            inference: takes precedence over the attribute, also over that of a `Shortcut`.
            residual: added before the activation; has the shape of x. If no operator
                fuses the activation, plain JAX adds it after the rounding. A `Shortcut` stands for
                another norm whose result is added.

        Returns:
            y, with the shape of x, and the new state.

        Raises:
            NameError: `axis_name` does not name a mapped axis in scope.
            ValueError: a shape or the value of an argument is invalid.
            TypeError: the type of an argument is invalid, or x is complex.
        """
        del key
        x = jnp.asarray(x)
        if isinstance(residual, Shortcut):
            norm = checked_norm(residual.norm, BatchNorm, "equinox_layers")
            shortcut, state = norm._prepared(jnp.asarray(residual.x), state, inference)
            own, state = self._prepared(x, state, inference, shortcut.call.result)
            y = own.call.join(shortcut.call)
            return y, own.new_state(shortcut.new_state(state))
        residual = checked_residual(residual, x)
        dtypes = () if residual is None else (residual.dtype,)
        own, state = self._prepared(x, state, inference, *dtypes)
        y = own.call.run(residual)
        return y, own.new_state(state)

    def _prepared(
        self, x: jax.Array, state: eqx.nn.State, inference: bool | None, *residual_dtype: Any
    ) -> tuple["_Prepared", eqx.nn.State]:
        """The call, not yet run, and the state after what comes before it."""
        if x.ndim == 0 or x.shape[0] != self.input_size:
            raise ValueError(
                f"BatchNorm: x must have shape (input_size, ...) with input_size={self.input_size},"
                f" got {x.shape}; the layer takes one example with channels first, under"
                " jax.vmap(axis_name=...)."
            )
        check_momentum("momentum", self.momentum)
        check_epsilon("BatchNorm", self.eps, "eps")
        inference = checked_mode("inference", self.inference if inference is None else inference)
        given = None
        if inference:
            given = running.averages(self, state)
        elif self.axis_name is None:
            raise ValueError(
                "BatchNorm: axis_name must name the mapped axis of the batch, got None, with which"
                " training would normalise each example by itself."
            )
        else:
            check_names_in_scope(self.axis_name, None, "axis_name", is_optional=False)
            if self.mode == "ema":
                with names_in_scope("BatchNorm", self.axis_name):
                    given, state = running.mixed(self, x, state)
        vectors = [self.weight, self.bias, *(given or ())]
        dtypes = [v.dtype for v in vectors if v is not None]
        result = promoted(x.dtype, *dtypes, *residual_dtype)
        if not jnp.issubdtype(result, jnp.inexact):
            result = np.dtype(np.float32)
        require_real(x, result, "equinox.nn.BatchNorm")

        batch: list[BatchStatistics] = []
        call = PreparedCall(
            self._options(), x, self.weight, self.bias, given, result, update=batch.append
        )

        def new_state(state: eqx.nn.State) -> eqx.nn.State:
            for statistics in batch:
                state = running.counted(self, statistics, state)
            return state

        return _Prepared(call, new_state), state

    def _options(self) -> LayerCall:
        return LayerCall(
            axis=0,
            epsilon=self.eps,
            activation=layer_activation("BatchNorm", "activation", self.activation),
            num_groups=1,
            save=self.save,
            implementation=self.implementation,
            axis_name=self.axis_name,
            axis_index_groups=None,
        )


class Shortcut(NamedTuple):
    """The `BatchNorm` of a block's shortcut and its input, as the residual of another `BatchNorm`.

        y, state = bn(x1, state, residual=Shortcut(other_bn, x2))
        # y = act(batch_norm(x1) + other_batch_norm(x2))

    The two norms and the addition are one call of `jax_bnar.dual_bn_act` if the first norm has an
    activation that the operators have and the second none, and their other options and the shapes
    agree; otherwise the second norm runs first. The state that is returned has the averages of
    both.

    Attributes:
        norm: a `jax_bnar.equinox_layers.BatchNorm`.
        x: its input, with the shape of the other norm's.
    """

    norm: BatchNorm
    x: jax.Array


class _Prepared(NamedTuple):
    """A call, and the function that enters its batch statistics into the state once it has run."""

    call: PreparedCall
    new_state: Callable[[eqx.nn.State], eqx.nn.State]
