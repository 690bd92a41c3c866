"""One call of a BatchNorm layer, prepared but not yet run, so that another one can join it.

`act(batch_norm(x1) + batch_norm(x2))` is one operator, but in a network it is two layers, each
with its own variables. Each layer prepares its call. The call of the first layer then takes that of
the second as its residual, and runs both as one `jax_bnar.dual_bn_act` if that is possible.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._layers.activation import NONE
from jax_bnar._layers.call import LayerCall, channel_vector
from jax_bnar._layers.channel_view import channel_view
from jax_bnar._layers.promotion import compute_dtype
from jax_bnar._layers.renorm import Correction, refuse_mask
from jax_bnar._layers.statistics import BatchStatistics
from jax_bnar._operators.forms import infer, train
from jax_bnar._operators.validation import check_shape_like


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """One call of a layer.

    Attributes:
        call: the layer's options.
        x: the input.
        scale: the scale, or None.
        bias: the bias, or None.
        given: mean and var if the layer uses its running statistics, otherwise None.
        result: the dtype of the layer's result.
        update: what the layer does with the batch statistics.
        correction: what BatchRenorm corrects batch statistics towards, or None.
    """

    call: LayerCall
    x: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None
    given: tuple[jax.Array, jax.Array] | None
    result: Any
    update: Callable[[BatchStatistics], None]
    correction: Correction | None = None

    def run(self, residual: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        """act(norm(x) + residual).

        Raises:
            NotImplementedError: there are a mask and a correction.
        """
        if self.correction is not None:
            refuse_mask(mask)
        arrays = (self.x, residual, self.scale, self.bias)
        if self.given is not None:
            return self.call.with_given_statistics(*arrays, *self.given, result=self.result)
        y, statistics = self.call.with_batch_statistics(
            *arrays, mask=mask, result=self.result, correction=self.correction
        )
        self.update(statistics)
        return y

    def join(self, other: "PreparedCall", mask: jax.Array | None = None) -> jax.Array:
        """act(norm(x) + other_norm(other_x)), as one call of the operator if that is possible.

        `result` of this call must already take the dtype of the other layer's result into account.
        The mask selects the elements of both inputs that count in the statistics.

        Raises:
            ValueError: the inputs of the two norms differ in shape.
        """
        self.check_shape_of(other)
        if mask is not None or not self._takes(other):
            return self.run(other.run(mask=mask), mask)
        view = channel_view(self.call.axis, self.x.shape)
        compute = self._compute_dtype(other)
        x = tuple(view.view(each.x.astype(compute)) for each in (self, other))
        affine = tuple(
            Affine(*(None if v is None else channel_vector(v, compute) for v in vectors))
            for vectors in ((self.scale, self.bias), (other.scale, other.bias))
        )
        activation = self.call.activation
        options: dict[str, Any] = {
            "epsilon": self.call.epsilon,
            "axis": view.axis,
            "implementation": self.call.implementation,
            "negative_slope": activation.negative_slope,
        }
        if self.given is not None and other.given is not None:
            statistics = tuple(
                Statistics(channel_vector(mean, compute), channel_vector(var, compute))
                for mean, var in (self.given, other.given)
            )
            y = infer("BatchNorm", x, None, affine, statistics, activation.fused, **options)
            return self.call.finish(view, y, self.x, self.result)
        y, mean1, var1, mean2, var2 = train(
            *("BatchNorm", x, None, affine, activation.fused),
            **options,
            axis_name=self.call.axis_name,
            axis_index_groups=self.call.axis_index_groups,
            num_groups=self.call.num_groups,
            save=self.call.save,
        )
        elements = self.call.elements(view, x[0])
        # In the order in which separate calls would update them.
        other.update(BatchStatistics(mean2, var2, elements))
        self.update(BatchStatistics(mean1, var1, elements))
        return self.call.finish(view, y, self.x, self.result)

    def check_shape_of(self, other: "PreparedCall") -> None:
        """Raises ValueError unless the other norm's input has the shape of this one's."""
        check_shape_like("BatchNorm", "the input of the shortcut's norm", other.x, self.x)

    def _compute_dtype(self, other: "PreparedCall") -> Any:
        return compute_dtype(self.result, self.x.dtype, other.result)

    def _gains(self, other: "PreparedCall") -> bool:
        """Whether one call reads and writes less than two.

        If the operator applies no activation, two calls would read inputs that are to be widened as
        they are stored, which the operator of two inputs does not.
        """
        inputs = {self.x.dtype, other.x.dtype}
        return self.call.activation.fused != "none" or inputs == {self._compute_dtype(other)}

    def _takes(self, other: "PreparedCall") -> bool:
        """Whether one call of the operator can run both."""
        same_options = dataclasses.replace(self.call, activation=NONE) == other.call
        return (
            same_options
            and self._gains(other)
            and self.correction is None
            and other.correction is None
            and (self.given is None) == (other.given is None)
            # Otherwise x2 would be normalised in another dtype here than in a separate call.
            and self._compute_dtype(other) == compute_dtype(other.result, other.x.dtype)
        )
