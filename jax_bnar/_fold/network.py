"""The program with the folded weights, and its division: what is computed once, and what remains.

Everything that depends on the variables alone is computed once. What the rest of the program reads
of it are the new variables.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend import core

from jax_bnar._base import jax_compat
from jax_bnar._fold.chain import Chain, follow
from jax_bnar._fold.fold_nodes import channel_axis, fold_nodes
from jax_bnar._fold.joined import joined
from jax_bnar._fold.producers import WeightedSum, weighted_sum
from jax_bnar._fuse.failures import PlaceOfError
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Operand, Value, evaluate, values_of
from jax_bnar._fuse.rewrite import Rewrite
from jax_bnar._fuse.sizes import is_at_least


@dataclasses.dataclass(frozen=True)
class Fold:
    """A weighted sum with the BatchNorm that was folded into it.

    Attributes:
        sum: the weighted sum.
        chain: what of the sum's channels follows it.
        end: the last value of the program that was so replaced: the end of the chain, or of the
            one behind a concatenation.
    """

    sum: WeightedSum
    chain: Chain
    end: Value


class Network:
    """A function of variables and inputs, in which each BatchNorm that can be is folded.

    Attributes:
        graph: the program before that.
        given: the values that follow from the variables alone.
        folds: what is folded.
        left: the positions in the program of the sums that are not folded, whatever follows, each
            with its reason.
        refused: those of the sums whose weights have turned out, in `fold`, not to hold the factor,
            each with its reason.
    """

    def __init__(
        self, jaxpr: Any, num_given: int, left: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """The first `num_given` inputs of the jaxpr, its constants included, are the variables."""
        self.left = left
        self.refused: dict[int, str] = {}
        self.graph = Graph(jaxpr)
        self._variables = self.graph.inputs[:num_given]
        self._inputs = self.graph.inputs[num_given:]
        self.given = given_values(self.graph, self._variables)
        self.folds: list[Fold] = []
        rewrite = Rewrite(self.graph)
        sums = self._sums()
        joins = [joined(self.graph, node, sums, self.given) for node in self.graph.nodes]
        of_joins: set[Node] = set()
        for each in filter(None, joins):
            if self._fold(rewrite, each.parts, each.chain.end, [each.node_of_parts()]):
                of_joins.update(found.node for found, _ in each.parts)
        for found, chain in sums.values():
            if chain.normalises and found.node not in of_joins:
                self._fold(rewrite, [(found, chain)], chain.end)
        self._once, self._each, self._boundary = self._divided(rewrite.nodes())

    def _sums(self) -> dict[Value, tuple[WeightedSum, Chain]]:
        """The sums of the program, each with what follows it, by the value that this reaches."""
        found = (weighted_sum(node, self.given) for node in self.graph.nodes)
        taken = (each for each in found if each is not None and each.node.order not in self.left)
        chains = (
            (each, follow(self.graph, each.result, each.channels, self.given)) for each in taken
        )
        return {chain.reached: (each, chain) for each, chain in chains}

    def _fold(
        self,
        rewrite: Rewrite,
        parts: Sequence[tuple[WeightedSum, Chain]],
        end: Value,
        joins: Sequence[Node] = (),
    ) -> bool:
        """Folds chains into their sums; returns whether it does.

        It does not if the channels of one are not known, or if `end` would depend on itself.
        """
        once: list[Node] = []
        each: list[Node] = []
        for found, chain in parts:
            axis = channel_axis(found, chain)
            if axis is None:
                return False
            refuse = functools.partial(self.refused.setdefault, found.node.order)
            of_weight, of_result = fold_nodes(found, chain, axis, refuse)
            once.append(of_weight)
            each.append(of_result)
        if not all(map(rewrite.add, [*once, *each, *joins])):
            return False
        self.given.update(value for node in once for value in node.outputs)
        self.folds += [Fold(found, chain, end) for found, chain in parts]
        return True

    @property
    def new_variables(self) -> list[Any]:
        """Shapes and dtypes of the new variables, in the order of `fold` and `run`.

        Those that the results read come first, then those of the operations before, backwards.
        """
        return [value.aval for value in self._boundary]

    @property
    def recipe(self) -> list[str]:
        """How the new variables are computed from the old ones, as lines that can be compared."""
        names = {value: f"variable {i}" for i, value in enumerate(self._variables)}
        lines = []
        for node in self._once:
            operands = ", ".join(_name_of(operand, names) for operand in node.operands)
            # Functions among the parameters are others in each trace.
            params = re.sub(r" at 0x[0-9a-f]+", "", str(sorted(node.params.items())))
            names.update((output, f"{len(lines)}.{i}") for i, output in enumerate(node.outputs))
            lines.append(f"{node.name} {params} of {operands}")
        return [*lines, *(names[value] for value in self._boundary)]

    @property
    def constants(self) -> list[Any]:
        """The arrays within what `recipe` describes, which it does not show."""
        return [array for node in self._once for array in _constants_of(node.params.values())]

    def fold(self, arrays: Sequence[Any]) -> list[Any]:
        """The new variables, from the old ones."""
        return _evaluated(self._once, self._variables, self._boundary, arrays)

    def run(self, variables: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The results of the program, from the new variables and the other inputs."""
        return _evaluated(
            self._each,
            [*self._boundary, *self._inputs],
            self.graph.outputs,
            [*variables, *inputs],
        )

    def _divided(self, nodes: Sequence[Node]) -> tuple[list[Node], list[Node], list[Value]]:
        """The nodes that run once, those that run each time, and what the latter read."""
        # What repeats fewer numbers is better computed each time from these. Arrays of the size of
        # the batch among the variables would also tie them to that size.
        contents = _contents(self._variables, (node for node in nodes if not node.has_effects))
        boundary: dict[Value, None] = {}
        each: list[Node] = []
        wanted: set[Value] = set()

        def want(operands: Iterable[Operand]) -> None:
            for value in values_of(operands):
                if value in self.given and contents[value] == math.prod(value.shape):
                    boundary[value] = None
                else:
                    wanted.add(value)

        want(self.graph.outputs)
        for node in reversed(nodes):
            if node.has_effects or any(value in wanted for value in node.outputs):
                each.append(node)
                want(node.operands)
        needed = set(boundary)
        once: list[Node] = []
        for node in reversed(nodes):
            if any(value in needed for value in node.outputs):
                once.append(node)
                needed.update(values_of(node.operands))
        return once[::-1], each[::-1], list(boundary)


def _evaluated(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Operand],
    arrays: Sequence[Any],
) -> list[Any]:
    """`evaluate`, which raises what the program raises."""
    try:
        return evaluate(nodes, inputs, outputs, arrays)
    except PlaceOfError as place:
        raise place.error from None


def _constants_of(params: Iterable[Any]) -> Iterator[Any]:
    """The arrays in the closed jaxprs among the parameters of an equation."""
    for param in params:
        if isinstance(param, (tuple, list)):
            yield from _constants_of(param)
        elif isinstance(param, (core.ClosedJaxpr, core.Jaxpr)):
            yield from getattr(param, "consts", ())
            for equation in jax_compat.open_jaxpr(param).eqns:
                yield from _constants_of(equation.params.values())


def _name_of(operand: Operand, names: dict[Value, str]) -> str:
    if isinstance(operand, Value):
        return names[operand]
    return f"{operand.value!r} of {operand.aval}"


def given_values(graph: Graph, variables: Sequence[Value]) -> set[Value]:
    """The values that are computed from the variables and from literals."""
    given = set(variables)
    for node in graph.nodes:
        if not node.has_effects and all(value in given for value in values_of(node.operands)):
            given.update(node.outputs)
    return given


def _contents(variables: Sequence[Value], nodes: Iterable[Node]) -> dict[Value, int]:
    """For each value, at most how many numbers determine it: fewer than it has, if it repeats."""
    contents = {value: math.prod(value.shape) for value in variables}
    for node in nodes:
        behind = sum(contents.get(value, 0) for value in values_of(node.operands))
        for value in node.outputs:
            size = math.prod(value.shape)
            contents[value] = behind if is_at_least(size, behind) else size
    return contents
