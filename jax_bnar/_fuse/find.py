"""What is fused in one graph: the matches that go together, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_bnar._fuse.affine import affine_candidate
from jax_bnar._fuse.dual import duals
from jax_bnar._fuse.failures import Failure, caught
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import Match, RefusedMatch
from jax_bnar._fuse.nodes import Node, Value, values_of
from jax_bnar._fuse.own import own_candidates
from jax_bnar._fuse.rewrite import CycleError, Rewrite
from jax_bnar._fuse.search import summed_array, training_candidates
from jax_bnar._fuse.training_match import TrainingMatch
from jax_bnar._fuse.unexplained import unexplained


def found(
    graph: Graph, axis_sizes: Mapping[Any, int], failures: list[Failure]
) -> tuple[list[Match], list[RefusedMatch]]:
    """The matches that can be added one after another, training forms first, and the refusals."""
    training: list[TrainingMatch] = []
    refused: list[RefusedMatch] = []
    taken: set[Value] = set()
    rewrite = Rewrite(graph)
    examined: set[Value] = set()
    for node in graph.nodes:
        with caught(failures, node):
            x = summed_array(node)
            if x is None or x in examined:
                continue
            examined.add(x)
            for candidate in training_candidates(graph, x, taken, axis_sizes):
                if isinstance(candidate, RefusedMatch):
                    refused.append(candidate)
                elif rewrite.add(candidate.node()):
                    training.append(candidate)
                    taken.update(candidate.replaced)
                    break
    matches: list[Match] = list(training)
    with caught(failures):
        for dual in duals(training):
            if rewrite.add(dual.node()):
                matches[matches.index(dual.first)] = dual
                matches.remove(dual.second)
    for node in graph.nodes:
        with caught(failures, node):
            found = affine_candidate(graph, node, taken)
            if isinstance(found, RefusedMatch):
                refused.append(found)
            elif found is not None and rewrite.add(found.node()):
                matches.append(found)
                taken.update(found.replaced)
    for node in graph.nodes:
        with caught(failures, node):
            for candidate in own_candidates(graph, node, taken):
                if isinstance(candidate, RefusedMatch):
                    refused.append(candidate)
                elif rewrite.add(candidate.node()):
                    matches.append(candidate)
                    taken.update((*candidate.replaced, *(c.results[0] for c in candidate.calls)))
                    break
    regions = [r for one in (*training, *refused) if (r := one.region) is not None]
    known = {value.producer for region in regions for value in region.terms}
    with caught(failures):
        known_nodes = {node for node in known if node is not None}
        refused.extend(unexplained(graph, known_nodes, axis_sizes))
    return matches, refused


def rewritten(graph: Graph, matches: Sequence[Match]) -> tuple[list[Match], list[Node]]:
    """The matches that are kept, and the nodes to run.

    While the matches together make a cycle, the last one is dropped.
    """
    matches = list(matches)
    while True:
        rewrite = Rewrite(graph)
        added = [(match, node) for match in matches if rewrite.add(node := match.node())]
        try:
            nodes = rewrite.nodes()
        except CycleError:
            matches = [match for match, _ in added[:-1]]
            continue
        read = {*values_of(graph.outputs), *(v for n in nodes for v in values_of(n.operands))}
        final = {node: match.node(read) for match, node in added}
        return [match for match, _ in added], [final.get(node, node) for node in nodes]
