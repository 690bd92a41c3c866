"""The join of two BatchNorms: `act(batch_norm(x1) + batch_norm(x2))`."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from jax_bnar._fuse.match import Match
from jax_bnar._fuse.nodes import Operand, Value
from jax_bnar._fuse.statistics import restored, with_nans_of
from jax_bnar._fuse.training import Normalisation
from jax_bnar._fuse.training_match import TrainingMatch
from jax_bnar._fuse.vectors import arrays_of
from jax_bnar._operators.activated import dual_bn_act


@dataclasses.dataclass(eq=False)
class DualMatch(Match):
    """Two matches, of which the second gives the residual of the first."""

    first: TrainingMatch
    second: TrainingMatch

    @property
    def operator(self) -> str:
        return "dual_bn_add_relu" if self.tail.has_relu else "dual_bn_act"

    @property
    def arrays(self) -> tuple[Value, ...]:
        return self.first.x, self.second.x

    @property
    def other_results(self) -> list[Value]:
        return [*self.first.other_results, *self.second.other_results]

    @property
    def operands(self) -> list[Operand]:
        vectors = [*self.first.vectors, *self.second.vectors]
        return [self.first.x, self.second.x, *(v for vector in vectors for v in vector.values)]

    def call(self, wanted: Collection[Value], *arrays: Any) -> list[jax.Array]:
        first, second = self.first, self.second
        x1, x2, *rest = arrays
        count = sum(len(vector.values) for vector in first.vectors)
        scale1, bias1, shift1 = arrays_of(
            first.vectors, rest[:count], first.sizes_of_vectors, first.form.dtype
        )
        scale2, bias2, shift2 = arrays_of(
            second.vectors, rest[count:], second.sizes_of_vectors, second.form.dtype
        )
        shape, options = first.shape_and_options(self.result.shape)
        joined = functools.partial(dual_bn_act, activation=self.tail.activation, **options)
        y, mean1, var1, mean2, var2 = first.over_members(joined)(
            first.arranged(x1.astype(first.form.dtype), shape),
            second.arranged(x2.astype(second.form.dtype), shape),
            scale1,
            with_nans_of(shift1, bias1),
            scale2,
            with_nans_of(shift2, bias2),
        )
        return [
            y.reshape(self.result.shape),
            *restored(first.statistics, wanted, mean1, var1, shift1),
            *restored(second.statistics, wanted, mean2, var2, shift2),
        ]


def duals(matches: Sequence[TrainingMatch]) -> list[DualMatch]:
    """The pairs among the matches of one graph."""
    added = alone(matches)
    found = []
    for first in matches:
        if len(first.tail.residuals) == 1:
            second = added.get(first.tail.residuals[0])
            if second is not None and _agree(first, second) and _gains(first, second):
                found.append(DualMatch(first.x, first.normalised, first.tail, first, second))
    return found


def alone(matches: Sequence[TrainingMatch]) -> dict[Value, TrainingMatch]:
    """The matches that only normalise, by their results, which one operation reads."""
    return {
        match.result: match
        for match in matches
        if match.operator == "batch_norm" and match.region.graph.sole_reader(match.result)
    }


def _agree(first: TrainingMatch, second: TrainingMatch) -> bool:
    """Whether one call can compute both, which requires the same dtype and the same keywords."""
    return _shared(first.form) == _shared(second.form)


def _gains(first: TrainingMatch, second: TrainingMatch) -> bool:
    """Whether one call reads and writes less than two.

    Without an activation, two calls would read an x that the program widens as it is stored, which
    the operator of two inputs does not.
    """
    return first.tail.is_activated or {first.x.dtype, second.x.dtype} == {first.result.dtype}


def _shared(form: Normalisation) -> tuple[Any, ...]:
    """What one call has once for both of its inputs."""
    return (
        form.dtype,
        form.epsilon,
        form.result_axis,
        form.num_groups,
        len(form.vmapped),
        form.axis_name,
        form.axis_index_groups,
    )
