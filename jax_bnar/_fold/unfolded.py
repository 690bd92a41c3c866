"""The BatchNorms that are left in a network, and why."""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jax_bnar._base import jax_compat
from jax_bnar._fold.chain import ARITHMETIC, MOVES, follow
from jax_bnar._fold.network import Fold, Network, given_values
from jax_bnar._fold.producers import WEIGHTED_SUMS, weighted_sum
from jax_bnar._fuse.bodies import bodies_of
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Operand, Value, is_broadcast, source, values_of
from jax_bnar._fuse.own import own_form


class Unfolded(NamedTuple):
    """A node that still normalises an array.

    Attributes:
        node: the node.
        reason: why it was not folded.
        order: the position in the program of the node, or of the loop that contains it.
        around: the name stacks of the equations that contain it, each with a slash.
    """

    node: Node
    reason: str
    order: int
    around: str = ""


def unfolded(network: Network) -> Iterator[Unfolded]:
    """The BatchNorms that are left, those in loops and branches included."""
    graph, given = network.graph, network.given
    folded = {value for fold in network.folds for value in _values_of_chain(graph, fold)}
    for node in graph.nodes:
        if not node.outputs or node.outputs[0] in folded or node.outputs[0] in given:
            continue
        kind = _statistics_of(node, given)
        if kind == "batch":
            yield Unfolded(node, _BATCH_STATISTICS, node.order)
        elif kind == "given":
            array = _normalised(node, given)
            asked = 'implementation="ffi" asks for the kernel'
            reason = asked if array is None else _reason(network, array)
            yield Unfolded(node, reason, node.order)
        else:
            for inner, why, around in _within(node, given):
                yield Unfolded(inner, why, node.order, around)


_BATCH_STATISTICS = (
    "its statistics are those of the batch; call the network in evaluation, with running statistics"
)


def _within(node: Node, given: set[Value], boundary: str = "") -> Iterator[tuple[Node, str, str]]:
    """The normalising nodes in the bodies of a node, why they are left, and the names around.

    `boundary` is the loop or branch around it: a jit within that is none.
    """
    if node.name in _BOUNDARIES or not boundary:
        boundary = node.name
    names = f"{node.name_stack}/" if str(node.name_stack) else ""
    for body in _bodies_of(node):
        graph, inside = _graph_of(node, body, given)
        for inner in graph.nodes:
            if not inner.outputs or inner.outputs[0] in inside:
                continue
            kind = _statistics_of(inner, inside)
            if kind is not None:
                reason = _BATCH_STATISTICS if kind == "batch" else _left_in(boundary)
                yield inner, reason, names
                continue
            for each, reason, around in _within(inner, inside, boundary):
                yield each, reason, f"{names}{around}"


_BOUNDARIES = ("scan", "while", "cond", "shard_map")


def _bodies_of(node: Node) -> list[Any]:
    """Those of loops, branches and calls, and of functions with derivatives of their own."""
    own = node.params.get("call_jaxpr") if node.name.startswith("custom_") else None
    return bodies_of(node) if own is None else [own]


def _graph_of(node: Node, body: Any, given: set[Value]) -> tuple[Graph, set[Value]]:
    """The graph of a body, and the values in it that follow from the variables."""
    graph = Graph(jax_compat.open_jaxpr(body))
    # The first operands of cond and while are no inputs of a branch, and of the body of the loop.
    pairs = list(zip(reversed(node.operands), reversed(graph.inputs), strict=False))
    carried = {"scan": node.params.get("num_carry"), "while": len(node.outputs)}.get(node.name)
    if carried is not None:
        # What a loop carries is another value in each turn.
        after = len(pairs) - node.params["num_consts"] - carried if node.name == "scan" else 0
        del pairs[after : after + carried]
    constants = graph.inputs[: len(jax_compat.open_jaxpr(body).constvars)]
    known = [inner for outer, inner in pairs if not isinstance(outer, Value) or outer in given]
    return graph, given_values(graph, [*constants, *known])


def _left_in(name: str) -> str:
    if name in ("scan", "while"):
        return f"it is in the body of a {name}; a Python loop in its place would be folded"
    if name == "cond":
        return "it is in a branch of a cond, of which folding knows nothing"
    if name.startswith("custom_"):
        return f"it is in a function with a derivative of its own ({name})"
    return f"it is within a {name}, which is left as it is"


def _values_of_chain(graph: Graph, fold: Fold) -> Iterator[Value]:
    value = fold.chain.start
    while value is not fold.end:
        (reader,) = graph.readers(value)
        (value,) = reader.outputs
        yield value


# How many values behind a vector are searched for the square root that makes it the factor of a
# normalisation.
_MOST_VALUES = 40


def _normalised(node: Node, given: set[Value]) -> Value | None:
    """The array that a node multiplies by a given vector with a reciprocal root in it."""
    if node.name not in ("mul", "div") or len(node.inputs) != 2:
        return None
    for array, vector in (node.inputs, node.inputs[::-1]):
        origin, _ = source(vector)
        if not isinstance(array, Value) or array in given or origin not in given:
            continue
        if _root_behind(origin) is not None and array.shape:
            return array
    return None


def _statistics_of(node: Node, given: set[Value]) -> Literal["given", "batch"] | None:
    """By which statistics a node normalises: an operator of ours, or what looks like BatchNorm."""
    form = own_form(node.equation)
    if form == "inference" or _normalised(node, given) is not None:
        return "given"
    return "batch" if form == "training" or _normalises_by_itself(node) else None


def _normalises_by_itself(node: Node) -> bool:
    """Whether a node scales the channels of an array by the root of sums over an array.

    In LayerNorm, GroupNorm and the like the root varies along the batch.
    """
    if node.name not in ("mul", "div") or len(node.inputs) != 2:
        return False
    for array, vector in (node.inputs, node.inputs[::-1]):
        origin, places = source(vector)
        along = [axis for axis, place in enumerate(places) if place is not None]
        if not isinstance(array, Value) or not is_broadcast(vector, node.outputs[0]):
            continue
        if len(along) != 1 or along == [0]:
            continue
        root = _root_behind(origin)
        if root is not None and _behind(root, ("reduce_sum",)) is not None:
            return True
    return False


def _root_behind(vector: Operand) -> Value | None:
    """The square root from which the vector is computed, if only elementwise operations follow."""
    return _behind(vector, ("rsqrt", "sqrt", "pow"), (*WEIGHTED_SUMS, "reduce_sum", "reduce_max"))


def _behind(operand: Operand, names: Collection[str], stops: Collection[str] = ()) -> Value | None:
    """The nearest result of one of these primitives from which an operand is computed."""
    waiting = collections.deque([operand])
    seen: set[Value] = set()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.popleft()
        if not isinstance(value, Value) or value in seen or value.producer is None:
            continue
        seen.add(value)
        if value.producer.name in names:
            return value
        if value.producer.name not in stops:
            waiting.extend(values_of(value.producer.inputs))
    return None


def _reason(network: Network, array: Operand) -> str:
    """Why a normalisation of this array was not folded."""
    graph, given = network.graph, network.given
    value = array
    while isinstance(value, Value) and (node := value.producer) is not None:
        found = weighted_sum(node, given)
        if node.order in network.left:
            return network.left[node.order]
        if found is not None:
            chain = follow(graph, found.result, found.channels, given)
            return _USED_ELSEWHERE if graph.sole_reader(chain.reached) is None else _OTHER_VECTORS
        if node.name in WEIGHTED_SUMS:
            for operand in node.operands:
                if not is_real(operand.dtype):
                    return f"{operand.dtype} weights or inputs cannot hold its factor"
            return "the weight of the convolution before it is not one of the variables"
        if node.name == "concatenate":
            return _reason_of_parts(network, node.operands)
        arrays = [v for v in values_of(node.inputs) if v not in given]
        if len(arrays) != 1 or node.name not in _PASSED:
            return f"its input comes from {_name(node)}, not from a convolution or a matrix product"
        (value,) = arrays
    return "its input is not the result of a convolution or a matrix product"


def _reason_of_parts(network: Network, parts: Sequence[Operand]) -> str:
    """Why a normalisation of these arrays, concatenated, was not folded."""
    if len(set(parts)) < len(parts):
        return _USED_ELSEWHERE
    # A part into which a norm of it alone would have been folded is not the reason.
    reasons = (_reason(network, part) for part in parts)
    return next((reason for reason in reasons if reason != _OTHER_VECTORS), _OTHER_VECTORS)


_USED_ELSEWHERE = "an array between the convolution and its result is used elsewhere as well"
_OTHER_VECTORS = (
    "its vectors do not run along the channels of the convolution or matrix product before it"
)
_PASSED = frozenset([*ARITHMETIC, *MOVES, "convert_element_type", "copy"])


def _name(node: Node) -> str:
    if node.name == "custom_jvp_call":
        return jax_compat.function_name(node.params["call_jaxpr"].jaxpr) or "an activation"
    return node.name
