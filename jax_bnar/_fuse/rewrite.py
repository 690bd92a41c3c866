"""Puts fused nodes into a graph: who defines what now, in which order, what is left."""

from collections.abc import Iterator

from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Value, values_of


class CycleError(Exception):
    """A node would need what is computed from its own result."""


class Rewrite:
    """A graph in which some values are defined by new nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.definitions: dict[Value, Node] = {}
        effects = [node for node in graph.nodes if node.has_effects]
        self._before = dict(zip(effects[1:], effects, strict=False))
        self._effects = effects

    def add(self, node: Node) -> bool:
        """Has the node define its outputs; False, and nothing done, where that makes a cycle."""
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
        """What has to run, each node behind what it needs, effects in the program's order."""
        order: list[Node] = []
        state: dict[Node, bool] = {}  # False: begun, True: done
        roots = [*self._effects, *self._defining(values_of(self.graph.outputs))]
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

    def _needs(self, node: Node) -> Iterator[Node]:
        yield from self._defining(values_of(node.inputs))
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
        """Looks back no further than where the first of the new node's values was computed."""
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
