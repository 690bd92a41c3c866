"""A normalisation by batch statistics, and the public operators that compute it."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jax_bnar._base.activations import may_widen
from jax_bnar._base.dtypes import is_widened_by_operator
from jax_bnar._fuse.match import Match, summed
from jax_bnar._fuse.nodes import Operand, Value
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.sizes import is_long
from jax_bnar._fuse.statistics import Statistic, restored, with_nans_of
from jax_bnar._fuse.training import Normalisation
from jax_bnar._fuse.vectors import Vector, arrays_of
from jax_bnar._operators.activated import bn_act
from jax_bnar._operators.api import batch_norm, bn_add_relu, bn_relu


@dataclasses.dataclass(eq=False)
class TrainingMatch(Match):
    """A normalisation by batch statistics, with what follows it.

    Attributes:
        region: what is computed from x.
        form: the normalisation that the polynomials prove.
        statistics: the other values of the program that can be taken from the kernel's results.
    """

    region: Region
    form: Normalisation
    statistics: list[Statistic]

    @property
    def operator(self) -> str:
        if self.tail.has_relu:
            return "bn_add_relu" if self.tail.residuals else "bn_relu"
        return "bn_act" if self.tail.is_activated or self.tail.residuals else "batch_norm"

    @property
    def other_results(self) -> list[Value]:
        return [statistic.value for statistic in self.statistics]

    @property
    def vectors(self) -> list[Vector]:
        """Scale, bias and shift."""
        unknowns = self.region.unknowns
        return [
            Vector.of(self.form.scale, unknowns, neutral=1),
            Vector.of(self.form.bias, unknowns, neutral=0),
            Vector.of(self.form.shift, unknowns, neutral=0),
        ]

    @property
    def operands(self) -> list[Operand]:
        vectors = [value for vector in self.vectors for value in vector.values]
        return [self.x, *self.tail.residuals, *vectors]

    def call(self, wanted: Collection[Value], *arrays: Any) -> list[jax.Array]:
        x, *rest = arrays
        count = len(self.tail.residuals)
        residuals, rest = rest[:count], rest[count:]
        scale, bias, shift = arrays_of(self.vectors, rest, self.sizes_of_vectors, self.form.dtype)
        bias = with_nans_of(shift, bias)
        shape, options = self.shape_and_options(self.result.shape)
        dtype = self.result.dtype
        act = self.tail.activation
        if not may_widen(act.name) or not is_widened_by_operator(x.dtype, dtype):
            x = x.astype(dtype)  # These operators do not widen x themselves.
        x = self.arranged(x, shape)
        z = summed(residuals).reshape(shape) if residuals else None

        def normalised(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, ...]:
            if self.operator == "bn_act":
                return bn_act(x, scale, bias, act, z=z, out_dtype=dtype, **options)
            if not self.tail.is_activated:
                return batch_norm(x, scale, bias, out_dtype=dtype, **options)
            if z is None:
                return bn_relu(x, scale, bias, out_dtype=dtype, **options)
            return bn_add_relu(x, z, scale, bias, out_dtype=dtype, **options)

        y, mean, var = self.over_members(normalised)(x, z, scale, bias)
        return [y.reshape(self.result.shape), *restored(self.statistics, wanted, mean, var, shift)]

    @property
    def sizes_of_vectors(self) -> dict[int, Any]:
        """The axes of x that scale, bias and shift have as arrays, with their sizes."""
        shape = self.region.x.shape
        return {axis: shape[axis] for axis in (*self.form.vmapped, self.form.axis)}

    def over_members(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of all members of an ensemble, from the function of one."""
        for _ in self.form.vmapped:
            function = jax.vmap(function)
        return function

    def shape_and_options(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The shape that the operator's arrays take, and its keywords, for a result of `shape`.

        The shape is that outside of `over_members`.
        """
        form = self.form
        axis = form.result_axis - len(form.vmapped)
        if form.num_groups > 1 and form.groups_are_apart:
            # Here the groups have a separate axis, which the operator expects within the batch.
            shape, axis = (shape[0] * shape[1], *shape[2:]), axis - 1
        options = {
            "epsilon": form.epsilon,
            "axis": axis,
            "axis_name": form.axis_name or None,
            "axis_index_groups": form.axis_index_groups,
            "num_groups": form.num_groups,
        }
        return shape, options

    def arranged(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """x as the operator takes it: its axes are in the order of the normalised array.

        The array that is given may have another shape, before it is split into groups.
        """
        order = self.form.order
        if list(order) != sorted(order):
            x = x.reshape([size for size in self.region.x.shape if is_long(size)])
            x = x.transpose([sorted(order).index(axis) for axis in order])
        return x.reshape(shape)
