"""Puts fused nodes into a graph: which node now defines each value, and which run in what order."""

from collections.abc import Iterator

from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Value, values_of


class CycleError(Exception):
    """A node would need a value that is computed from its own result."""


class Rewrite:
    """A graph in which some values are defined by new nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.definitions: dict[Value, Node] = {}
        effects = [node for node in graph.nodes if node.has_effects]
        self._before = dict(zip(effects[1:], effects, strict=False))
        self._effects = effects

    def add(self, node: Node) -> bool:
        """Lets the node define its outputs, unless that makes a cycle; returns whether it does."""
        before = {value: self.definitions.get(value) for value in node.outputs}
        self.definitions.update(dict.fromkeys(node.outputs, node))
        if not self._reaches_itself(node):
            return True
        for value, definition in before.items():
            if definition is None:
                del self.definitions[value]
            else:
                self.definitions[value] = definition
        return False

    def nodes(self) -> list[Node]:
        """The nodes that have to run, each after those it needs, with effects in program order."""
        order: list[Node] = []
        state: dict[Node, bool] = {}  # False if a node has been begun, True if it is done
        roots = self._roots()
        wanted = self._reachable(roots)
        for root in [node for node in self.graph.nodes if node in wanted] + roots:
            stack: list[tuple[Node, Iterator[Node]]] = []
            if root not in state:
                state[root] = False
                stack.append((root, self._needs(root)))
            while stack:
                node, needs = stack[-1]
                for needed in needs:
                    if needed not in state:
                        state[needed] = False
                        stack.append((needed, self._needs(needed)))
                        break
                    if not state[needed]:
                        raise CycleError
                else:
                    state[node] = True
                    order.append(node)
                    stack.pop()
        return order

    def running(self) -> set[Node]:
        """The nodes that have to run, in no order."""
        return self._reachable(self._roots())

    def _roots(self) -> list[Node]:
        return [*self._effects, *self._defining(values_of(self.graph.outputs))]

    def _needs(self, node: Node) -> Iterator[Node]:
        yield from self._defining(values_of(node.operands))
        if node in self._before:
            yield self._before[node]

    def _defining(self, values: Iterator[Value]) -> Iterator[Node]:
        for value in values:
            node = self.definitions.get(value, value.producer)
            if node is not None:
                yield node

    def _reachable(self, roots: list[Node]) -> set[Node]:
        found: set[Node] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(self._needs(node))
        return found

    def _reaches_itself(self, new: Node) -> bool:
        """Whether the new node depends on its own result.

        The search goes back no further than to where the program computed the first of its values.
        """
        first = min(value.producer.order for value in new.outputs if value.producer is not None)
        waiting = list(self._needs(new))
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node is new:
                return True
            if node not in seen and (node.order >= first or node.order < 0):
                seen.add(node)
                waiting.extend(self._needs(node))
        return False
