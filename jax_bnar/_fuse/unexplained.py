"""Normalisations that no polynomial describes: `explain` reports them, and what stands in the way.

A mask, a `stop_gradient` or a loop ends what `Region` understands, so nothing is matched and
nothing is refused. This module looks for arrays that are divided by the root of something computed
from two sums of an array, as a mean and a variance are. Nothing is ever fused because of it.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax_bnar._fuse import named_axes
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.nodes import Node, Value, array_and_vector, source, values_of
from jax_bnar._fuse.sizes import is_at_least
from jax_bnar._fuse.training import OF_EACH_EXAMPLE

_ROOTS = frozenset(["rsqrt", "sqrt", "pow"])
# The primitives between a vector of roots and the array that it scales.
_VECTOR_STEPS = frozenset(
    """
    mul div neg add sub convert_element_type copy pvary broadcast_in_dim reshape squeeze expand_dims
    select_n stop_gradient transpose
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
# The primitives between x and its sum, or between x and the place where it is scaled.
_ARRAY_STEPS = _VECTOR_STEPS | {"square", "integer_pow", "add_any", "max", "min", "name", "jit"}
_SUMS = frozenset(
    """
    reduce_sum dot_general reduce_window_sum reduce_window reduce cumsum scan while
    """.split()  # noqa: SIM905
)
_REASONS = {
    "stop_gradient": "stop_gradient is applied to the statistics or to the array",
    "select_n": "it contains a mask or a choice at run time",
    "dot_general": "the statistics are computed by a matrix product",
    "reduce_window_sum": "the statistics are computed by lax.reduce_window",
    "reduce_window": "the statistics are computed by lax.reduce_window",
    "reduce": "the statistics are computed by lax.reduce",
    "cumsum": "the statistics are computed by cumulative sums",
    "scan": "the statistics are computed in a loop",
    "while": "the statistics are computed in a loop",
    "jit": "a part of it is a jitted function that contains more than arithmetic",
    "name": "a part of it has a checkpoint_name",
}
# How many values are examined for one root, and how many whole arrays in a chain.
_MOST_VALUES, _LONGEST_CHAIN = 200, 12


def unexplained(
    graph: Graph, known: Collection[Node], axis_sizes: Mapping[Any, int]
) -> Iterator[RefusedMatch]:
    """The normalisations that are not understood.

    Args:
        graph: the graph to search.
        known: the nodes of what was matched, or was refused for a known reason.
        axis_sizes: the sizes of the mapped axes in scope.
    """
    seen: set[Node] = set()
    for root in graph.nodes:
        if root.name not in _ROOTS or not is_real(root.outputs[0].dtype):
            continue
        scaled = _scaled_by(graph, root)
        if scaled is None or scaled in known or scaled in seen:
            continue
        seen.add(scaled)
        nodes, sums = _what_goes_into(scaled)
        if sums >= 2:
            reason = _reason(nodes, scaled, axis_sizes)
            yield RefusedMatch(scaled, reason, nodes=frozenset(nodes))


def _scaled_by(graph: Graph, root: Node) -> Node | None:
    """The first node that multiplies a whole array by the root, or divides it."""
    waiting = [root.outputs[0]]
    seen = set(waiting)
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        for node in graph.readers(value):
            if node.name not in _VECTOR_STEPS:
                continue
            if node.name in ("mul", "div"):
                pair = array_and_vector(node)
                if pair is not None and source(pair[1])[0] is source(value)[0]:
                    return node
            for result in node.outputs:
                if result not in seen:
                    seen.add(result)
                    waiting.append(result)
    return None


def _what_goes_into(scaled: Node) -> tuple[list[Node], int]:
    """The nodes that compute the array, and the number of sums among them."""
    size = math.prod(scaled.outputs[0].shape)
    nodes: list[Node] = []
    sums = 0
    waiting = [(value, 0) for value in values_of(scaled.inputs)]
    seen: set[Value] = {value for value, _ in waiting}
    while waiting and len(seen) < _MOST_VALUES:
        value, chain = waiting.pop(0)
        node = value.producer
        if node is None:
            continue
        is_array = is_at_least(math.prod(value.shape), size)
        if is_array and (node.name not in _ARRAY_STEPS or chain > _LONGEST_CHAIN):
            continue
        if (
            node.name in _SUMS
            and not is_array
            and any(is_at_least(math.prod(v.shape), size) for v in node.inputs)
        ):
            sums += 2 if node.name in ("scan", "while") else 1
        nodes.append(node)
        for operand in values_of(node.inputs):
            if operand not in seen:
                seen.add(operand)
                waiting.append((operand, chain + 1 if is_array else 0))
    return nodes, sums


def _reason(nodes: Collection[Node], scaled: Node, axis_sizes: Mapping[Any, int]) -> str:
    names = {node.name for node in nodes}
    reasons = dict.fromkeys(reason for name, reason in _REASONS.items() if name in names)
    for node in nodes:
        if node.name == "psum" and (reason := named_axes.why_not(node.params, axis_sizes)):
            reasons[reason] = None
    if not reasons and any(map(_adds_to_a_deviation, nodes)):
        return (
            "a number is added to the standard deviation; BatchNorm adds epsilon to the variance:"
            " sqrt(var + epsilon)"
        )
    if not reasons and _is_another_array(nodes, scaled):
        return "the standard deviation of one array scales another one, such as a gate"
    if not reasons and any(map(_sums_a_weighted_array, nodes)):
        return "a mask or a weight multiplies each element before it is summed"
    if not reasons and not any(map(_adds_up_the_batch, nodes)):
        return OF_EACH_EXAMPLE
    if not reasons:
        dtypes = sorted({str(v.dtype) for v in (*values_of(scaled.inputs), *scaled.outputs)})
        return (
            "its arithmetic is not understood, or it rounds intermediate values"
            f" ({', '.join(dtypes)})"
        )
    return "; ".join(reasons)


def _adds_up_the_batch(node: Node) -> bool:
    """Whether a node may add up examples: along the first axis, or along a mapped one."""
    return node.name == "psum" or (node.name == "reduce_sum" and 0 in node.params["axes"])


def _sums_a_weighted_array(node: Node) -> bool:
    """Whether a node adds up the products of an array and another one."""
    if node.name != "reduce_sum" or not isinstance(node.inputs[0], Value):
        return False
    product = node.inputs[0].producer
    if product is None or product.name != "mul" or product.inputs[0] is product.inputs[1]:
        return False
    return all(isinstance(source(operand)[0], Value) for operand in product.inputs)


def _adds_to_a_deviation(node: Node) -> bool:
    """Whether a node adds a number to a square root."""
    if node.name != "add":
        return False
    origins = [source(operand)[0] for operand in node.inputs]
    producers = [origin.producer for origin in origins if isinstance(origin, Value)]
    return len(producers) == 1 and producers[0] is not None and producers[0].name == "sqrt"


def _is_another_array(nodes: Collection[Node], scaled: Node) -> bool:
    """Whether the scaled array has no array in common with what the sums are taken of."""
    pair = array_and_vector(scaled)
    if pair is None or not isinstance(pair[0], Value):
        return False
    size = math.prod(scaled.outputs[0].shape)
    summed = [v for node in nodes if node.name in _SUMS for v in values_of(node.inputs)]
    return _arrays_behind([pair[0]], size).isdisjoint(_arrays_behind(summed, size))


def _arrays_behind(values: Sequence[Value], size: int) -> set[Value]:
    """The whole arrays from which values are computed element by element."""
    waiting = list(values)
    seen: set[Value] = set()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        if value in seen or not is_at_least(math.prod(value.shape), size):
            continue
        seen.add(value)
        if value.producer is not None and value.producer.name in _ARRAY_STEPS:
            waiting.extend(values_of(value.producer.inputs))
    return seen
