"""Searches a graph for the training form of BatchNorm(-Add)(-ReLU)."""

import dataclasses
from collections.abc import Collection, Iterator

from jax_bnar._fuse import axes as axes_of
from jax_bnar._fuse import named_axes
from jax_bnar._fuse.dtypes import holds, is_real
from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.nodes import (
    Node,
    Operand,
    Value,
    array_and_vector,
    source,
)
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.statistics import Statistic, statistics_of
from jax_bnar._fuse.tail import Tail, tail_of
from jax_bnar._fuse.training import (
    RefusalError,
    UsedElsewhereError,
    normalisation,
)
from jax_bnar._fuse.training_match import TrainingMatch
from jax_bnar._fuse.unknowns import Clamped, Moment, ReciprocalRoot

# The primitives whose operand may be an array that is normalised. A psum sums over an axis of its
# operand where a `vmap` inside the program has bound the name.
SUMS = {"reduce_sum", "psum"}
# What may hold an array and its square before they are summed.
_STACKS = ("stack", "concatenate")


def summed_array(node: Node) -> Value | None:
    """The array of which a node takes the sum, which may be a statistic that normalises it."""
    if node.name not in SUMS or (node.name == "psum" and not named_axes.dims_of(node.params)):
        return None
    x = _before_the_sum(node.inputs[0])
    if isinstance(x, Value) and len(x.shape) >= 2 and 0 not in x.shape and is_real(x.dtype):
        return x
    return None


def training_candidates(
    region: Region, taken: Collection[Value], inside: Collection[Value]
) -> Iterator[TrainingMatch | RefusedMatch]:
    """The possible matches of the normalisations of x, the best first, then the refusal if any.

    A program may normalise an array more than once. So there are more candidates after one has
    become a match, whose values are to be added to `taken` and `inside`: those that no other match
    may define, and those from which the matches compute their normalised arrays.
    """
    if not _divides_by_a_root(region):
        return
    if (unshifted := without_shift(region)) is not None:
        matches = _candidates(unshifted, taken, inside)
        yield from (match for match in matches if isinstance(match, TrainingMatch))
    yield from _candidates(region, taken, inside)


def without_shift(region: Region) -> Region | None:
    """The region of x without the vectors that the program adds to it; None if it adds none.

    Such a vector, as the bias of a convolution, cancels in the normalisation, so the sum of array
    and vector need not be computed. The mean still contains it, and NaNs are kept: see `README.md`.
    """
    x = region.x
    while x.producer is not None and x.producer.name == "add":
        pair = array_and_vector(x.producer)
        if pair is None or not isinstance(pair[0], Value) or pair[0].dtype != x.dtype:
            break
        if not isinstance(source(pair[1])[0], Value):
            break  # a literal
        x = pair[0]
    if x is region.x:
        return None
    return Region(region.graph, x, region.axis_sizes, region.x)


def _candidates(
    region: Region, taken: Collection[Value], inside: Collection[Value]
) -> Iterator[TrainingMatch | RefusedMatch]:
    graph, x = region.graph, region.x
    refused: RefusedMatch | None = None
    is_used_elsewhere = False
    for value in reversed(region.terms):
        if region.degree(value) != 1 or value is x:
            continue
        if value in inside:
            # What was refused may be no more than an array that is computed from this one.
            refused, is_used_elsewhere = None, False
        if value in taken or value in inside:
            continue
        try:
            form = normalisation(region, value)
            statistics = list(statistics_of(region, form.over))
            _require_unused(region, value, statistics)
        except RefusalError as refusal:
            if _is_divided_by_a_root(region, value) and _takes_a_mean(region, value):
                refused = refused or RefusedMatch(_producer(value), str(refusal), region)
                is_used_elsewhere |= isinstance(refusal, UsedElsewhereError)
            continue
        statistics = [each for each in statistics if each.value not in taken]
        stored = region.stored
        tail = tail_of(graph, value, taken, stored.dtype)
        yield TrainingMatch(stored, value, tail, region, form, statistics)
        if tail.residuals and value not in inside:
            reason = "the residual depends on the statistics: a cycle"
            yield TrainingMatch(stored, value, Tail(value, reason=reason), region, form, statistics)
        if value in inside:
            refused, is_used_elsewhere = None, False
    if refused is not None:
        yield dataclasses.replace(refused, is_used_elsewhere=is_used_elsewhere)


def _before_the_sum(operand: Operand, *, enters_stacks: bool = True) -> Operand:
    """The array itself, if what is summed is its square, a wider copy or a flattened one.

    A program may also stack the array and its square, and sum both at once. A stack of other arrays
    is normalised as a whole, as in DenseNet.
    """
    while isinstance(operand, Value) and (node := operand.producer) is not None:
        inner = node.inputs[0] if node.inputs else operand
        if (
            node.name == "square"
            or (node.name == "integer_pow" and node.params["y"] == 2)
            or (node.name == "mul" and node.inputs[0] is node.inputs[1])
        ):
            pass
        elif node.name == "convert_element_type":
            if not is_real(inner.dtype) or not holds(operand.dtype, inner.dtype):
                break
        elif node.name in ("reshape", "squeeze", "expand_dims"):
            labels = axes_of.own(inner.shape)
            sizes = dict(enumerate(inner.shape))
            if axes_of.reshaped(inner.shape, labels, operand.shape, sizes) is None:
                break
        elif node.name == "transpose":
            stack = inner.producer if isinstance(inner, Value) else None
            if stack is None or stack.name not in _STACKS:
                break
        elif node.name in _STACKS:
            if not enters_stacks:
                break
            first, *others = (_before_the_sum(each, enters_stacks=False) for each in node.inputs)
            if any(other is not first for other in others):
                break
            if others and all(each is inner for each in node.inputs):
                break  # an array that is repeated
        elif node.name not in ("pvary", "copy"):
            break
        operand = inner
    return operand


def _divides_by_a_root(region: Region) -> bool:
    return any(_is_divided_by_a_root(region, value) for value in region.terms)


def _is_divided_by_a_root(region: Region, value: Value) -> bool:
    slopes = (p.by_power_of(region.x_number).get(1) for p in region.terms[value].polynomials)
    return any(
        isinstance(region.unknowns[number], ReciprocalRoot)
        for slope in slopes
        if slope is not None
        for number in slope.unknowns
    )


def _takes_a_mean(region: Region, value: Value) -> bool:
    """Whether a mean of x is in a value; an RMSNorm or a division by a norm has squares alone."""
    waiting = list(region.terms[value].polynomials)
    while waiting:
        for number in waiting.pop().unknowns:
            unknown = region.unknowns[number]
            if isinstance(unknown, Moment) and unknown.power == 1:
                return True
            if isinstance(unknown, ReciprocalRoot | Clamped):
                waiting.append(unknown.of)
    return False


def _require_unused(region: Region, end: Value, statistics: list[Statistic]) -> None:
    """Raises UsedElsewhereError if an array between x and the normalised one has another use."""
    replaced = {end, *(statistic.value for statistic in statistics)}
    wanted: set[Value] = set()
    for value in reversed(region.terms):  # a reader comes before the values that it reads
        readers = region.graph.readers(value)
        results = (r for reader in readers for r in reader.outputs)
        if value not in replaced and (
            value in region.graph.returned
            or any(r not in replaced and (r not in region.terms or r in wanted) for r in results)
            or not all(reader.outputs for reader in readers)  # such as a print
        ):
            wanted.add(value)
    for value in between(region, end):
        if value is not end and value in wanted and _depends_on_more_than_x(region, value):
            raise UsedElsewhereError("an array between x and the normalised one is used elsewhere")


def _depends_on_more_than_x(region: Region, value: Value) -> bool:
    return region.degree(value) != 0 and any(
        polynomial.unknowns != {region.x_number} for polynomial in region.terms[value].polynomials
    )


def hidden_of(region: Region, inner: Collection[Value]) -> set[Value]:
    """Those arrays between x and the normalised one of a match that nothing else reads.

    `_require_unused` sees to that. What is made of them, such as a variance around the mean, is in
    the region of x already, so the search need not begin at them.
    """
    return {value for value in inner if _depends_on_more_than_x(region, value)}


def between(region: Region, end: Value) -> set[Value]:
    """The values of the region from which the end is computed."""
    found: set[Value] = set()
    waiting = [end]
    while waiting:
        value = waiting.pop()
        if value in found or value is region.x:
            continue
        found.add(value)
        waiting.extend(
            operand
            for operand in _producer(value).inputs
            if isinstance(operand, Value) and operand in region.terms
        )
    return found


def _producer(value: Value) -> Node:
    assert value.producer is not None
    return value.producer
