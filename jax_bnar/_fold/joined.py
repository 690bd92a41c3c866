"""A BatchNorm of several weighted sums that are concatenated, as in MixNet, CSPNet and NASNet.

Each sum takes its channels of the factor and of the offset:

    concatenate([conv(x, k), conv(x, l)]) * factor + offset
        = concatenate([conv(x, k * f) + o, conv(x, l * g) + p])

    where factor = concatenate([f, g]), offset = concatenate([o, p])
"""

import dataclasses
import functools
from collections.abc import Mapping, Set
from typing import Any

import jax
from jax.core import ShapedArray

from jax_bnar._fold.chain import Chain, Step, follow
from jax_bnar._fold.producers import WeightedSum
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Value


@dataclasses.dataclass(frozen=True)
class Joined:
    """A concatenation with the BatchNorm behind it.

    Attributes:
        node: the concatenation.
        parts: the sums that it reads, each with a chain of its own operations and of its channels
            of the BatchNorm. It ends in a value that is not in the program.
        chain: what follows the concatenation.
    """

    node: Node
    parts: list[tuple[WeightedSum, Chain]]
    chain: Chain

    def node_of_parts(self) -> Node:
        """The node that computes the end of the chain from those of the parts."""
        return Node(
            "joined",
            {},
            [chain.end for _, chain in self.parts],
            [self.chain.end],
            self.node.equation,
            self.node.name_stack,
            functools.partial(_run, self.node, self.chain),
        )


def joined(
    graph: Graph, node: Node, sums: Mapping[Value, tuple[WeightedSum, Chain]], given: Set[Value]
) -> Joined | None:
    """A concatenation of weighted sums and what follows it, if that is a BatchNorm of them all.

    `sums` are the sums of the program, each with its chain, by the value that the chain reaches.
    """
    if node.name != "concatenate":
        return None
    parts = [sums.get(operand) for operand in node.operands if isinstance(operand, Value)]
    found = [part for part in parts if part is not None and graph.sole_reader(part[1].reached)]
    # A sum that is concatenated with itself would be computed for each of its places.
    if len({id(part) for part in found}) != len(node.operands):
        return None
    along = node.params["dimension"]
    axes = [
        axis
        for axis in range(len(node.outputs[0].shape))
        if all(chain.origins[axis] in _channels(weighted, chain) for weighted, chain in found)
    ]
    chain = follow(graph, node.outputs[0], axes, given)
    if not chain.normalises:
        return None
    begin = 0
    of_parts: list[tuple[WeightedSum, Chain]] = []
    for weighted, before in found:
        end = begin + before.reached.shape[along]
        steps = [_of_part(step, before, along, (begin, end)) for step in chain.steps]
        of_parts.append((weighted, _extended(before, steps, node, chain.end.dtype)))
        begin = end
    return Joined(node, of_parts, chain)


def _channels(weighted: WeightedSum, chain: Chain) -> Set[int]:
    """The axes of the sum along which further vectors may run."""
    return weighted.channels.keys() if chain.axis is None else {chain.axis}


def _of_part(step: Step, before: Chain, along: int, channels: tuple[int, int]) -> Step:
    """A step behind the concatenation, as one of the sum that has these of the channels."""
    if step.axis is None:
        return step
    part = channels if step.axis == along else None
    return dataclasses.replace(step, axis=before.origins[step.axis], part=part)


def _extended(before: Chain, steps: list[Step], node: Node, dtype: Any) -> Chain:
    """The chain of a part to the concatenation, and these steps."""
    end = Value(ShapedArray(before.reached.shape, dtype), node)
    moves = before.moves + before.further
    return dataclasses.replace(
        before, end=end, reached=end, steps=before.steps + steps, moves=moves, further=[]
    )


def _run(node: Node, chain: Chain, *parts: jax.Array) -> list[jax.Array]:
    (result,) = node.run(*parts)
    return chain.finish(result)
