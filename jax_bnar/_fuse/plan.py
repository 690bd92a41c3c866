"""The rewritten form of one jaxpr and of the jaxprs inside it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from jax_bnar._fuse import bodies
from jax_bnar._fuse.affine import affine_candidate
from jax_bnar._fuse.dual import duals
from jax_bnar._fuse.failures import Failure, caught
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import (
    RefusedMatch,
    TrainingMatch,
    summed_array,
    training_candidates,
)
from jax_bnar._fuse.nodes import Node, Value, evaluate, values_of
from jax_bnar._fuse.operators import Match, node_of, without_unread
from jax_bnar._fuse.own import own_candidates
from jax_bnar._fuse.rewrite import CycleError, Rewrite
from jax_bnar._fuse.unexplained import unexplained


@dataclasses.dataclass
class Plan:
    """How to run a jaxpr with its matches fused.

    Attributes:
        graph: the graph of the jaxpr.
        nodes: what to run, in order.
        matches: what is fused in this jaxpr.
        refused: what was examined and refused.
        failures: what could not be examined because of an unforeseen error.
        inner: the plans of the bodies of each node that has any, by the node before its rewrite.
    """

    graph: Graph
    nodes: list[Node]
    matches: list[Match]
    refused: list[RefusedMatch]
    failures: list[Failure]
    inner: dict[Node, list["Plan"]]

    @property
    def changes(self) -> bool:
        return bool(self.matches) or any(
            plan.changes for plans in self.inner.values() for plan in plans
        )

    def run(self, *args: Any) -> list[Any]:
        return evaluate(self.nodes, self.graph.inputs, self.graph.outputs, args)

    def abandon(self) -> None:
        """Fuses nothing after all, here and in the jaxprs inside this one."""
        self.matches, self.nodes = [], list(self.graph.nodes)
        for plans in self.inner.values():
            for plan in plans:
                plan.abandon()

    def all_failures(self) -> list[Failure]:
        """The failures in this jaxpr and in those inside it, each once."""
        found = {id(failure): failure for failure in self.failures}
        for plans in self.inner.values():
            for plan in plans:
                found.update((id(failure), failure) for failure in plan.all_failures())
        return list(found.values())


class Planner:
    """Makes one plan for each jaxpr, however often a program calls it."""

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[core.Jaxpr, Plan]] = {}
        self.rebuilt: dict[tuple[int, int], tuple[Any, ...]] = {}

    def plan(self, jaxpr: core.Jaxpr, axis_sizes: Mapping[Any, int]) -> Plan:
        key = (id(jaxpr), tuple(axis_sizes.items()))
        if key not in self._plans:
            # Keeping the jaxpr alive prevents another one from getting its id.
            self._plans[key] = (jaxpr, self._make(jaxpr, axis_sizes))
        return self._plans[key][1]

    def _make(self, jaxpr: core.Jaxpr, axis_sizes: Mapping[Any, int]) -> Plan:
        graph = Graph(jaxpr)
        plan = Plan(graph, list(graph.nodes), [], [], graph.failures, {})
        matches, plan.refused = _found(graph, axis_sizes, plan.failures)
        with caught(plan.failures):
            plan.matches, plan.nodes = _rewritten(graph, matches)
        for index, node in enumerate(plan.nodes):
            with caught(plan.failures, node):
                if inner := bodies.plans(node, self, axis_sizes):
                    plan.inner[node] = inner
                    if any(p.changes for p in inner):
                        plan.nodes[index] = bodies.rebuilt(node, inner, self)
        return plan


def _found(
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
                elif rewrite.add(node_of(candidate)):
                    training.append(candidate)
                    taken.update(candidate.replaced)
                    break
    matches: list[Match] = list(training)
    with caught(failures):
        for dual in duals(training):
            if rewrite.add(node_of(dual)):
                matches[matches.index(dual.first)] = dual
                matches.remove(dual.second)
    for node in graph.nodes:
        with caught(failures, node):
            found = affine_candidate(graph, node, taken)
            if isinstance(found, RefusedMatch):
                refused.append(found)
            elif found is not None and rewrite.add(node_of(found)):
                matches.append(found)
                taken.update(found.replaced)
    for node in graph.nodes:
        with caught(failures, node):
            for candidate in own_candidates(graph, node, taken):
                if isinstance(candidate, RefusedMatch):
                    refused.append(candidate)
                elif rewrite.add(node_of(candidate)):
                    matches.append(candidate)
                    taken.update((*candidate.replaced, *(c.results[0] for c in candidate.calls)))
                    break
    regions = [r for one in (*training, *refused) if (r := one.region) is not None]
    known = {value.producer for region in regions for value in region.terms}
    with caught(failures):
        refused.extend(unexplained(graph, {node for node in known if node is not None}))
    return matches, refused


def _rewritten(graph: Graph, matches: Sequence[Match]) -> tuple[list[Match], list[Node]]:
    """The matches that are kept, and the nodes to run.

    While the matches together make a cycle, the last one is dropped.
    """
    matches = list(matches)
    while True:
        rewrite = Rewrite(graph)
        added = [(match, node) for match in matches if rewrite.add(node := node_of(match))]
        try:
            nodes = rewrite.nodes()
        except CycleError:
            matches = [match for match, _ in added[:-1]]
            continue
        read = {*values_of(graph.outputs), *(v for n in nodes for v in values_of(n.operands))}
        for _, node in added:
            without_unread(node, read)
        return [match for match, _ in added], nodes
