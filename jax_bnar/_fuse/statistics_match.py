"""The statistics of BatchNorm alone, and the public operator that computes them."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax

from jax_bnar._fuse.match import Match, RefusedMatch
from jax_bnar._fuse.nodes import Operand, Value
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.statistics import Statistic, restored
from jax_bnar._fuse.vectors import Vector, arrays_of
from jax_bnar._operators.statistics import batch_statistics


@dataclasses.dataclass(eq=False)
class StatisticsMatch(Match):
    """The mean and the variance of x, where the program keeps what it makes of them.

    Attributes:
        region: what is computed from x.
        axis: the channel axis of x.
        num_groups: the number of groups of a ghost batch, which x has as its leading axis; or 1.
        axis_name: the mapped axes over which the statistics are taken.
        axis_index_groups: the groups of indices of these axes, or None.
        statistics: the values of the program that are taken from the kernel's results; the first is
            the variance.
        is_second_pass: whether the program takes the variance around the mean, for which it has to
            read x again.
        refused: why no operator computes the normalisation as well; None if none is in sight.
    """

    region: Region
    axis: int
    num_groups: int
    axis_name: tuple[Any, ...]
    axis_index_groups: tuple[tuple[int, ...], ...] | None
    statistics: list[Statistic]
    is_second_pass: bool
    refused: RefusedMatch | None = None

    @property
    def operator(self) -> str:
        return "batch_statistics"

    @property
    def reason(self) -> str:
        return "" if self.refused is None else self.refused.reason

    @property
    def refusal(self) -> RefusedMatch | None:
        return self.refused

    @property
    def moves_spared(self) -> int:
        return 1 if self.is_second_pass else 0

    @property
    def other_results(self) -> list[Value]:
        return [statistic.value for statistic in self.statistics[1:]]

    @property
    def operands(self) -> list[Operand]:
        return [self.x, *self._shift.values]

    def call(self, wanted: Collection[Value], *arrays: Any) -> list[jax.Array]:
        x, *vectors = arrays
        x = x.reshape(self.region.x.shape)
        (shift,) = arrays_of([self._shift], vectors, {self.axis: x.shape[self.axis]}, x.dtype)
        axis = self.axis
        if self.num_groups > 1:
            # The operator expects the groups within the batch.
            x, axis = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), axis - 1
        mean, var = batch_statistics(
            x,
            axis=axis,
            axis_name=self.axis_name or None,
            axis_index_groups=self.axis_index_groups,
            num_groups=self.num_groups,
        )
        return restored(self.statistics, {self.result, *wanted}, mean, var, shift)

    @property
    def _shift(self) -> Vector:
        return Vector.of(self.region.shift, self.region.unknowns, neutral=0)
