"""The join of two BatchNorms: `relu(batch_norm(x1) + batch_norm(x2))`."""

import dataclasses
from collections.abc import Sequence

from jax_bnar._fuse.match import Statistic, TrainingMatch
from jax_bnar._fuse.nodes import Value
from jax_bnar._fuse.tail import Tail


@dataclasses.dataclass
class DualMatch:
    """Two matches, of which the second gives the residual of the first."""

    first: TrainingMatch
    second: TrainingMatch

    operator = "dual_bn_add_relu"

    @property
    def x(self) -> Value:
        return self.first.x

    @property
    def normalised(self) -> Value:
        return self.first.normalised

    @property
    def tail(self) -> Tail:
        return self.first.tail

    @property
    def result(self) -> Value:
        return self.first.result

    @property
    def statistics(self) -> list[Statistic]:
        return [*self.first.statistics, *self.second.statistics]

    @property
    def replaced(self) -> list[Value]:
        return [self.result, *(statistic.value for statistic in self.statistics)]


def duals(matches: Sequence[TrainingMatch]) -> list[DualMatch]:
    """The pairs among the matches of one graph."""
    normalised = {
        match.result: match
        for match in matches
        if match.operator == "batch_norm" and match.region.graph.sole_reader(match.result)
    }
    found = []
    for first in matches:
        if len(first.tail.residuals) == 1:
            second = normalised.get(first.tail.residuals[0])
            if second is not None and _agree(first, second):
                found.append(DualMatch(first, second))
    return found


def _agree(first: TrainingMatch, second: TrainingMatch) -> bool:
    """Whether one call can compute both, which requires the same dtype and the same keywords."""
    a, b = first.form, second.form
    return (a.dtype, a.epsilon, a.result_axis, a.num_groups, a.axis_name) == (
        b.dtype,
        b.epsilon,
        b.result_axis,
        b.num_groups,
        b.axis_name,
    )
