"""Normalisations that lie partly inside and partly outside of a jitted function or a checkpoint.

The body of a jitted function is searched by itself, and rewritten once for all of its calls. So
what begins in one body and ends in another, or in none, is not seen. Here a program is searched
with all bodies opened; a match that crosses the boundary of a jitted function tells which calls
have to be opened for it. All other calls stay as they are, and so do all of them if there is none.

A `jax.checkpoint` is opened to look and never to run, because what is kept for backward and what is
computed again would no longer be what the program says. What crosses its boundary is refused.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jax.extend import core

from jax_bnar._base import jax_compat
from jax_bnar._fuse.affine import AffineMatch
from jax_bnar._fuse.find import find_matches
from jax_bnar._fuse.graph import Graph, inlinable, openable
from jax_bnar._fuse.match import Match, RefusedMatch
from jax_bnar._fuse.nodes import Node, Value, values_of
from jax_bnar._fuse.region import UNDERSTOOD
from jax_bnar._fuse.statistics_match import StatisticsMatch

_JITS = frozenset(["jit", "pjit"])
_CHECKPOINTS = frozenset(["checkpoint", "remat2"])
# The equations that are looked at when all calls are opened. A body counts for each of its calls,
# so a program with deeply shared bodies would otherwise have no bound.
_MOST_EQUATIONS = 20_000

# An equation after the calls around it, outermost first; and calls by their ids. A body that is
# called twice has the same equations both times, so one equation alone does not tell them apart.
_Calls = tuple[Any, ...]
_Path = tuple[int, ...]


def opened(graph: Graph, axis_sizes: Mapping[Any, int]) -> Graph:
    """The graph with those jitted functions inlined whose boundaries a match crosses."""
    if not _may_cross(graph, _JITS):
        return graph
    whole = graph.opened(_opening(openable))
    wanted = {
        _path(calls[: count + 1])
        for _, nodes in _crossing(whole, axis_sizes, _is_large)
        for calls in {node.calls for node in nodes}
        for count in range(len(calls))
    }
    if not wanted:
        return graph
    needed = graph.opened(lambda c: openable(c[-1]) if _path(c) in wanted else None)
    return needed if any(_crossing(needed, axis_sizes, _is_large)) else graph


def across_checkpoints(graph: Graph, axis_sizes: Mapping[Any, int]) -> list[RefusedMatch]:
    """What crosses the boundary of a checkpoint, for the report."""
    if not _may_cross(graph, _JITS | _CHECKPOINTS) or not _has_checkpoint(graph.jaxpr):
        return []
    whole = graph.opened(_opening(lambda e: _checkpointed(e) or openable(e)))
    refused = []
    for match, nodes in _crossing(whole, axis_sizes, lambda e: _is_checkpoint(e) or _is_large(e)):
        normalising = _between(match, match.normalised)
        if isinstance(match, AffineMatch) or len(_sides(nodes)) == 1:
            continue
        reason = _IN_PARTS if len(_sides(normalising)) > 1 else _TAIL_APART
        refused.append(RefusedMatch(normalising[-1], reason))
    return refused


_WHY = "fuse does not move anything across it, because it says what is saved and what is recomputed"
_IN_PARTS = (
    f"a part of it is inside of a jax.checkpoint and a part outside; {_WHY}: put all of it, from"
    " the mean to the ReLU, on one side"
)
_TAIL_APART = (
    "the addition or the ReLU after it is on the other side of the boundary of a jax.checkpoint;"
    f" {_WHY}: put them on the side of the BatchNorm to have them fused with it"
)


def _crossing(
    graph: Graph, axis_sizes: Mapping[Any, int], is_boundary: Callable[[Any], bool]
) -> Iterator[tuple[Match, list[Node]]]:
    """The matches that cross a boundary, each with the nodes that it replaces.

    What lies within one call, or in a call and those inside it, is found in the body of that call.
    """
    for match in find_matches(graph, axis_sizes, [])[0]:
        if isinstance(match, StatisticsMatch):
            continue  # Statistics alone are not worth a call that is no longer shared.
        nodes = _between(match, match.result)
        outermost = {next(map(id, filter(is_boundary, node.calls)), None) for node in nodes}
        if len(outermost) > 1:
            yield match, nodes


def _between(match: Match, end: Value) -> list[Node]:
    """The nodes between the arrays that are normalised and a value, in the order of the program."""
    given = set(values_of(match.operands))
    nodes: set[Node] = set()
    waiting = [end]
    while waiting:
        value = waiting.pop()
        if value not in given and value.producer is not None and value.producer not in nodes:
            nodes.add(value.producer)
            waiting.extend(values_of(value.producer.inputs))
    # Not what only prepares a vector: where that is done does not matter.
    reached = set(match.arrays)
    between = []
    for node in sorted(nodes, key=lambda node: node.order):
        if not reached.isdisjoint(values_of(node.inputs)):
            reached.update(node.outputs)
            between.append(node)
    return between


def _sides(nodes: Iterable[Node]) -> set[_Path]:
    """The checkpoints around each of the nodes."""
    return {_path(filter(_is_checkpoint, node.calls)) for node in nodes}


def _opening(body_of: Callable[[Any], core.Jaxpr | None]) -> Callable[[_Calls], core.Jaxpr | None]:
    """Opens each call that has a body, until there are too many equations."""
    left = _MOST_EQUATIONS

    def opens(calls: _Calls) -> core.Jaxpr | None:
        nonlocal left
        body = body_of(calls[-1])
        if body is None or len(body.eqns) > left:
            return None
        left -= len(body.eqns)
        return body

    return opens


def _path(calls: Iterable[Any]) -> _Path:
    return tuple(map(id, calls))


def _is_large(equation: Any) -> bool:
    return inlinable(equation) is None


def _is_checkpoint(equation: Any) -> bool:
    return equation.primitive.name in _CHECKPOINTS


def _checkpointed(equation: Any) -> core.Jaxpr | None:
    return jax_compat.open_jaxpr(equation.params["jaxpr"]) if _is_checkpoint(equation) else None


def _has_checkpoint(jaxpr: core.Jaxpr) -> bool:
    return any(
        _is_checkpoint(equation)
        or ((body := openable(equation)) is not None and _has_checkpoint(body))
        for equation in jaxpr.eqns
    )


def _may_cross(graph: Graph, names: Collection[str]) -> bool:
    """Whether anything that a match could replace goes into one of these calls, or comes from one.

    Only then is it worthwhile to open all calls.
    """
    for node in graph.nodes:
        if node.name not in names:
            continue
        for value in values_of(node.inputs):
            if value.producer is not None and _may_be_replaced(value.producer.equation):
                return True
        for index, value in enumerate(node.outputs):
            if graph.readers(value) and _ends_in_what_may_be_replaced(node.equation, index):
                return True
    return False


def _ends_in_what_may_be_replaced(equation: Any, index: int) -> bool:
    """Whether the result of this number comes from an equation that a match could replace."""
    if equation.primitive.name not in _JITS | _CHECKPOINTS:
        return _may_be_replaced(equation)
    body = jax_compat.open_jaxpr(equation.params["jaxpr"])
    for inner in reversed(body.eqns):
        for number, result in enumerate(inner.outvars):
            if result is body.outvars[index]:
                return _ends_in_what_may_be_replaced(inner, number)
    return False


def _may_be_replaced(equation: Any) -> bool:
    if equation.primitive.name == "custom_jvp_call":
        inner = equation.params["call_jaxpr"].jaxpr.eqns
        return any(each.primitive.name.startswith("bnar_") for each in inner)
    return equation.primitive.name in UNDERSTOOD or equation.primitive.name == "jax_bnar_named"
