"""One call of a BatchNorm layer: the arithmetic between a layer's variables and the operators.

The operators support one channel axis and one dtype. The layers also support several feature
axes, masks, named axes, and a separate result dtype.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.activations import may_widen
from jax_bnar._base.config import Save
from jax_bnar._base.dtypes import accumulation_dtype, is_widened_by_operator
from jax_bnar._base.element_count import element_count
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._layers.activation import LayerActivation, layer_activation
from jax_bnar._layers.channel_view import ChannelView, channel_view
from jax_bnar._layers.checks import check_options
from jax_bnar._layers.promotion import compute_dtype
from jax_bnar._layers.renorm import Correction
from jax_bnar._layers.statistics import BatchStatistics
from jax_bnar._operators.forms import infer, take_statistics, train
from jax_bnar._operators.named_axes import check_named_axes
from jax_bnar._operators.renorm import batch_renorm
from jax_bnar._operators.validation import check_epsilon
from jax_bnar._sharding.alignment import merge_axes, with_automatic_axes
from jax_bnar._sharding.collectives import parts_of


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The options of a layer that affect its arithmetic, named like the fields of Linen and NNX.

    The layers for Equinox and Haiku, whose options have other names, make it themselves.
    """

    axis: Any
    epsilon: float
    activation: LayerActivation
    num_groups: int
    save: Save
    implementation: Implementation
    axis_name: Any
    axis_index_groups: Any

    def __post_init__(self) -> None:
        # The operators check these again, but two of them in training only.
        check_options("BatchNorm", self.save, self.implementation, self.num_groups)
        # A join compares the calls of its two norms, and arrays have no single truth value.
        if isinstance(self.axis_index_groups, np.ndarray):
            object.__setattr__(self, "axis_index_groups", self.axis_index_groups.tolist())

    @classmethod
    def of(cls, layer: Any) -> "LayerCall":
        """Reads the options from the attributes of a Linen or NNX layer.

        Raises:
            ValueError, TypeError: the activation, `save` or `num_groups` is invalid.
        """
        options: dict[str, Any] = {
            field.name: getattr(layer, field.name) for field in dataclasses.fields(cls)
        }
        options["activation"] = layer_activation("BatchNorm", "activation", layer.activation)
        return cls(**options)

    def without_groups(self) -> "LayerCall":
        """The same call without ghost batches and named axes."""
        return dataclasses.replace(self, num_groups=1, axis_name=None, axis_index_groups=None)

    def with_batch_statistics(
        self,
        x: jax.Array,
        residual: jax.Array | None,
        scale: jax.Array | None,
        bias: jax.Array | None,
        *,
        mask: jax.Array | None,
        result: Any,
        correction: Correction | None = None,
    ) -> tuple[jax.Array, BatchStatistics]:
        """(y, statistics of x); y has dtype `result` unless the activation function changes it."""
        view, given = channel_view(self.axis, x.shape), x
        keeps_x = correction is None and self._widens_x
        x, residual, scale, bias, out_dtype = _operands(
            view, x, residual, scale, bias, result, keeps_x=keeps_x
        )
        if mask is not None:
            y, statistics = self._masked(view, x, residual, scale, bias, mask, out_dtype)
            return self.finish(view, y, given, result), statistics
        options: dict[str, Any] = {
            "epsilon": self.epsilon,
            "axis": view.axis,
            "axis_name": self.axis_name,
            "axis_index_groups": self.axis_index_groups,
            "num_groups": self.num_groups,
            "save": self.save,
            "implementation": self.implementation,
            "negative_slope": self.activation.negative_slope,
        }
        fused = self.activation.fused
        if correction is None:
            affine = (Affine(scale, bias),)
            options["out_dtype"] = out_dtype
            y, mean, var = train("BatchNorm", (x,), residual, affine, fused, **options)
        else:
            towards = correction.of_channels()
            y, mean, var = batch_renorm(x, residual, scale, bias, *towards, fused, **options)
        statistics = BatchStatistics(mean, var, self.elements(view, x))
        return self.finish(view, y, given, result), statistics

    def with_given_statistics(
        self,
        x: jax.Array,
        residual: jax.Array | None,
        scale: jax.Array | None,
        bias: jax.Array | None,
        mean: jax.Array,
        var: jax.Array,
        *,
        result: Any,
    ) -> jax.Array:
        """y, with dtype `result` unless the activation function changes it."""
        view = channel_view(self.axis, x.shape)
        *operands, out_dtype = _operands(
            view, x, residual, scale, bias, result, keeps_x=self._widens_x
        )
        statistics = (channel_vector(mean, out_dtype), channel_vector(var, out_dtype))
        y = self._given(view, operands, statistics, out_dtype)
        return self.finish(view, y, x, result)

    def _given(
        self,
        view: ChannelView,
        operands: Sequence[Any],
        statistics: Sequence[jax.Array],
        out_dtype: Any,
    ) -> jax.Array:
        """The inference form of operands in the view: x, residual, scale and bias."""
        x, residual, scale, bias = operands
        return infer(
            "BatchNorm",
            (x,),
            residual,
            (Affine(scale, bias),),
            (Statistics(*statistics),),
            self.activation.fused,
            negative_slope=self.activation.negative_slope,
            epsilon=self.epsilon,
            axis=view.axis,
            implementation=self.implementation,
            out_dtype=out_dtype,
        )

    @property
    def _widens_x(self) -> bool:
        """Whether the operator takes an x that is narrower than its result."""
        return may_widen(self.activation.fused)

    def elements(self, view: ChannelView, x: jax.Array) -> jax.Array | int:
        """The number of elements behind one mean of x, which is in the view."""
        elements: jax.Array | int = x.size // (x.shape[view.axis] * self.num_groups)
        if self.axis_name is None:
            return elements
        parts = parts_of(*check_named_axes("BatchNorm", self.axis_name, self.axis_index_groups))
        if isinstance(parts, int):
            return elements * parts
        return element_count(elements, parts, dtype=accumulation_dtype(x.dtype))

    def _masked(
        self,
        view: ChannelView,
        x: jax.Array,
        residual: jax.Array | None,
        scale: jax.Array | None,
        bias: jax.Array | None,
        mask: jax.Array,
        out_dtype: Any,
    ) -> tuple[jax.Array, BatchStatistics]:
        """(y, statistics) of operands in the view, where only selected elements count.

        It is the inference form with these statistics, which are differentiable operands of it.
        """
        check_epsilon("BatchNorm", self.epsilon)  # before anything is computed
        statistics = BatchStatistics(
            *take_statistics(
                "BatchNorm",
                x,
                axis=view.axis,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
                num_groups=self.num_groups,
                implementation=self.implementation,
                where=view.view_mask(mask),
            )
        )
        affine, of_groups = (scale, bias), (statistics.mean, statistics.var)
        if self.num_groups == 1:
            y = self._given(view, (x, residual, *affine), of_groups, out_dtype)
            return y, statistics

        def of_group(tensors: Any, affine: Any, statistics: Any) -> jax.Array:
            return self._given(view, (*tensors, *affine), statistics, out_dtype)

        def of_each_group(tensors: Any, affine: Any, statistics: Any) -> tuple[jax.Array]:
            grouped = jax.tree.map(
                lambda array: array.reshape(self.num_groups, -1, *array.shape[1:]), tensors
            )
            y = jax.vmap(of_group, in_axes=(0, None, 0))(grouped, affine, statistics)
            return (y.reshape(x.shape),)

        spec = jax.typeof(x).sharding.spec
        (y,) = with_automatic_axes(of_each_group, (spec,), (x, residual), affine, of_groups)
        return y, statistics

    def finish(self, view: ChannelView, y: jax.Array, x: jax.Array, result: Any) -> jax.Array:
        """What follows the operator: y, which is in the view, gets the shape of x."""
        return self.activation.finish(view.restore(y, x).astype(result))


def _operands(
    view: ChannelView,
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    result: Any,
    *,
    keeps_x: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None, np.dtype]:
    """The operands in the view with one channel axis, and the dtype that the operator runs in.

    All are in that dtype, but x stays as it is if `keeps_x` is set and the operator widens it.
    """
    given = (x.dtype,) if residual is None else (x.dtype, residual.dtype)
    compute = compute_dtype(result, *given)
    x = x if keeps_x and is_widened_by_operator(x.dtype, compute) else x.astype(compute)
    residual = None if residual is None else view.view(residual.astype(compute))
    scale, bias = (None if v is None else channel_vector(v, compute) for v in (scale, bias))
    return view.view(x), residual, scale, bias, compute


def channel_vector(of_features: jax.Array, compute: np.dtype) -> jax.Array:
    """A vector of the channels. Flax computes with integers as well, operators do not."""
    is_float = jnp.issubdtype(of_features.dtype, jnp.floating)
    vector = of_features if is_float else of_features.astype(compute)
    return merge_axes(vector, 0, vector.ndim)
