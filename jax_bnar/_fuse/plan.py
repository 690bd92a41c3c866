"""The rewritten form of one jaxpr and of the jaxprs inside it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jax_bnar._base import jax_compat
from jax_bnar._fuse import bodies, boundaries
from jax_bnar._fuse.constant_folding import known_numbers
from jax_bnar._fuse.failures import Failure, caught
from jax_bnar._fuse.find import find_matches, rewritten
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import Match, RefusedMatch
from jax_bnar._fuse.nodes import Node, evaluate


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
    _closed: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def changes(self) -> bool:
        return bool(self.matches) or any(
            plan.changes for plans in self.inner.values() for plan in plans
        )

    @property
    def refusals(self) -> list[RefusedMatch]:
        """What is refused, also where a part of it is fused."""
        partly = (match.refusal for match in self.matches)
        return [*self.refused, *(refusal for refusal in partly if refusal is not None)]

    def run(self, *args: Any) -> list[Any]:
        return evaluate(self.nodes, self.graph.inputs, self.graph.outputs, args)

    def closed(self, body: Any) -> Any:
        """A closed jaxpr, traced once, however many equations have this body."""
        if id(body) not in self._closed:
            avals = [value.aval for value in self.graph.inputs][len(body.consts) :]
            run: Callable[..., Any] = lambda *args: self.run(*body.consts, *args)  # noqa: E731
            # Keeping the body alive prevents another one from getting its id.
            self._closed[id(body)] = (body, jax.make_jaxpr(run)(*avals))
        return self._closed[id(body)][1]

    def walk(self, times: int = 1, around: str = "") -> Iterator[tuple["Plan", int, str]]:
        """All plans of a program, each with how often it runs and the names around it.

        A loop of unknown length counts as one run.
        """
        yield self, times, around
        for node, plans in self.inner.items():
            length = node.params["length"] if node.name == "scan" else 1
            names = f"{around}{node.name_stack}/" if str(node.name_stack) else around
            for plan in plans:
                yield from plan.walk(times * length, names)

    def abandon(self) -> None:
        """Fuses nothing after all, here and in the jaxprs inside this one."""
        for plan, _, _ in self.walk():
            plan.matches, plan.nodes = [], list(plan.graph.nodes)

    def all_failures(self) -> list[Failure]:
        """The failures in this jaxpr and in those inside it, each once."""
        failures = (failure for plan, _, _ in self.walk() for failure in plan.failures)
        return list({id(failure): failure for failure in failures}.values())


class Planner:
    """Makes one plan for each jaxpr, however often a program calls it."""

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[Any, Plan]] = {}

    def plan(self, body: Any, axis_sizes: Mapping[Any, int]) -> Plan:
        """The plan of a jaxpr, which may be closed."""
        jaxpr = jax_compat.open_jaxpr(body)
        # Closed jaxprs may share one that is open, and have other numbers.
        owner = body if getattr(body, "consts", ()) else jaxpr
        key = (id(owner), tuple(axis_sizes.items()))
        if key not in self._plans:
            # Keeping it alive prevents another one from getting its id.
            graph = Graph(jaxpr, axis_sizes, known_numbers(body))
            self._plans[key] = (owner, self._make(graph, axis_sizes))
        return self._plans[key][1]

    def _make(self, graph: Graph, axis_sizes: Mapping[Any, int]) -> Plan:
        failures: list[Failure] = []
        across: list[RefusedMatch] = []
        with caught(failures):
            graph = boundaries.opened(graph, axis_sizes)
            across = boundaries.across_checkpoints(graph, axis_sizes)
        plan = Plan(graph, list(graph.nodes), [], [], graph.failures + failures, {})
        matches, plan.refused = find_matches(graph, axis_sizes, plan.failures)
        plan.refused += across
        with caught(plan.failures):
            plan.matches, plan.nodes = rewritten(graph, matches)
        for index, node in enumerate(plan.nodes):
            with caught(plan.failures, node):
                if inner := self._plans_of_bodies(node, axis_sizes):
                    plan.inner[node] = inner
                    if any(p.changes for p in inner):
                        plan.nodes[index] = bodies.rebuilt(node, inner)
        return plan

    def _plans_of_bodies(self, node: Node, axis_sizes: Mapping[Any, int]) -> list[Plan]:
        within = bodies.axis_sizes_within(node, axis_sizes)
        return [self.plan(body, within) for body in bodies.bodies_of(node)]
