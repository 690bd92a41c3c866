"""Searches a region for statistics of BatchNorm that the rest of the program reads.

This comes after all other searches, so what is left here are programs of which no operator computes
more than the statistics: a scale for each element, `stop_gradient`, another epsilon, or statistics
that are only watched.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax_bnar._fuse import activations
from jax_bnar._fuse.in_passing import computed_in_passing
from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.nodes import Node, Value, values_of
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.search import without_shift
from jax_bnar._fuse.sizes import is_at_least
from jax_bnar._fuse.statistics import Statistic, statistics_of
from jax_bnar._fuse.statistics_match import StatisticsMatch
from jax_bnar._fuse.tail import Tail
from jax_bnar._fuse.training import RefusalError, channels, mapped
from jax_bnar._fuse.unknowns import Moment

# What the operator spares is a pass over x. A smaller x stays in the first cache of a core, from
# which it is read again in less time than an operator takes to start on a GPU.
_FEWEST_ELEMENTS = 4096


def populations(region: Region) -> list[frozenset[Any]]:
    """The sets of axes over which the program takes a mean of the squares of x.

    Without one there is no variance.
    """
    unknowns = (region.unknowns[number] for number in range(len(region.unknowns)))
    return [u.over for u in unknowns if isinstance(u, Moment) and u.power == 2]


def statistics_candidates(
    region: Region, over: frozenset[Any], running: Collection[Node], taken: Collection[Value]
) -> Iterator[StatisticsMatch | RefusedMatch]:
    """The possible matches of the statistics over these axes, the best first, or the refusal.

    Args:
        region: what is computed from the array that the program sums.
        over: one of the `populations`.
        running: the nodes that run, with those of all other matches.
        taken: the values that other matches compute.
    """
    unshifted = without_shift(region)
    regions = [region] if unshifted is None else [unshifted, region]
    refused: RefusedMatch | None = None
    for one in regions:
        candidate = _candidate(one, over, running, taken)
        if isinstance(candidate, StatisticsMatch):
            yield candidate
            refused = None
        elif one is region and candidate is not None:
            refused = candidate
    if refused is not None:
        yield refused


def _candidate(
    region: Region, over: frozenset[Any], running: Collection[Node], taken: Collection[Value]
) -> StatisticsMatch | RefusedMatch | None:
    """None if the program does not read a variance of the batch, with one number per channel."""
    unknowns = region.unknowns
    try:
        axis, num_groups = channels(region, over)
    except RefusalError:
        return None
    if axis == 0 or not unknowns.are_foreign(region.shift):
        return None
    if unknowns.polynomial_varies(region.shift) - {axis}:
        return None
    known = [s for s in statistics_of(region, over) if s.value not in taken]
    read = _read(region, {statistic.value for statistic in known}, running)
    wanted = sorted((s for s in known if s.value in read), key=lambda s: s.name != "var")
    if not wanted or wanted[0].name != "var":
        return None
    result = wanted[0].value
    assert result.producer is not None
    try:
        names, groups = mapped(region, over)
        _require_gain(region.stored, taken)
    except RefusalError as refusal:
        return RefusedMatch(result.producer, str(refusal), region)
    return StatisticsMatch(
        region.stored,
        result,
        Tail(result),
        region,
        axis=axis,
        num_groups=num_groups,
        axis_name=names,
        axis_index_groups=groups,
        statistics=wanted,
        is_second_pass=_is_around_the_mean(region, wanted),
    )


def _require_gain(x: Value, taken: Collection[Value]) -> None:
    """Raises RefusalError where the operator would not be faster than what XLA compiles."""
    if is_tiny(x):
        raise RefusalError(
            f"x has only {math.prod(x.shape)} elements, too few for batch_statistics to gain time"
        )
    if (node := computed_in_passing(x, taken)) is not None:
        name = node.params.get("name") or activations.name_of_custom(node) or node.name
        raise RefusalError(
            f"XLA computes x ({name}) in the loop that sums it, but batch_statistics would need it"
            " in memory"
        )


def is_tiny(x: Value) -> bool:
    return not is_at_least(math.prod(x.shape), _FEWEST_ELEMENTS)


def _read(region: Region, given: Collection[Value], running: Collection[Node]) -> set[Value]:
    """The values of the region that are needed if the values in `given` are computed elsewhere."""
    by_operators = {v for node in running if node.order < 0 for v in values_of(node.operands)}
    read = {
        value for value in region.terms if value in region.graph.returned or value in by_operators
    }
    for value in reversed(region.terms):  # a reader comes before the values that it reads
        for reader in region.graph.readers(value):
            if reader in running and _needs_operands(region, reader, given, read):
                read.add(value)
    return read


def _needs_operands(
    region: Region, reader: Node, given: Collection[Value], read: Collection[Value]
) -> bool:
    if reader.has_effects:
        return True
    return any(
        result not in given and (result not in region.terms or result in read)
        for result in reader.outputs
    )


def _is_around_the_mean(region: Region, statistics: Sequence[Statistic]) -> bool:
    """Whether a variance is the mean of squares of differences from the mean.

    XLA cannot take both means in one pass over x, because one depends on the other.
    """
    waiting = [s.value for s in statistics if s.name == "var"]
    seen = set(waiting)
    while waiting:
        value = waiting.pop()
        if region.degree(value) == 2 and any(
            isinstance(region.unknowns[number], Moment)
            for polynomial in region.terms[value].polynomials
            for number in polynomial.unknowns
        ):
            return True
        assert value.producer is not None or value is region.x
        if value.producer is not None and value is not region.x:
            inner = [v for v in values_of(value.producer.inputs) if v in region.terms]
            waiting.extend(v for v in inner if v not in seen)
            seen.update(inner)
    return False
