"""What a search finds: something that a fused operator replaces, or the reason why none does."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax

from jax_bnar._fuse.nodes import Node, Operand, Value
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.tail import Tail


@dataclasses.dataclass(eq=False)
class Match(abc.ABC):
    """What one call of a fused operator replaces.

    Attributes:
        x: the array that is normalised; the first of two.
        normalised: the normalised array.
        tail: the residuals and the activation that follow it.
    """

    x: Value
    normalised: Value
    tail: Tail

    @property
    @abc.abstractmethod
    def operator(self) -> str:
        """The name of the public function."""

    @property
    @abc.abstractmethod
    def operands(self) -> list[Operand]:
        """The values whose arrays `call` takes."""

    @abc.abstractmethod
    def call(self, wanted: Collection[Value], *arrays: Any) -> list[jax.Array]:
        """Calls the public function; returns the result, then those other results in `wanted`."""

    @property
    def other_results(self) -> Sequence[Value]:
        """The values of the program, except the result, that the operator gives as well."""
        return ()

    @property
    def arrays(self) -> tuple[Value, ...]:
        """The arrays that are normalised."""
        return (self.x,)

    @property
    def reason(self) -> str:
        """Why the operator covers less than it might; empty if nothing stands in the way."""
        return self.tail.reason

    @property
    def refusal(self) -> "RefusedMatch | None":
        """The normalisation of the same array that is refused, if only a part of it is fused."""
        return None

    @property
    def moves_spared(self) -> int:
        """How many reads and writes of whole arrays are avoided, in units of the size of x."""
        adds = bool(self.tail.residuals) or len(self.arrays) > 1
        return 2 * (self.tail.is_activated + adds)

    @property
    def result(self) -> Value:
        return self.tail.result

    @property
    def replaced(self) -> list[Value]:
        return [self.result, *self.other_results]

    @property
    def taken(self) -> list[Value]:
        """The values that no other match may take: those, and what only leads to them."""
        inner = (*self.tail.sums, self.tail.wide_result)
        return [*self.replaced, *(value for value in inner if value is not None)]

    def node(self, read: Collection[Value] | None = None) -> Node:
        """The node with the fused operator.

        It defines the result and, of the other results, those in `read`, or all if that is None.
        """
        producer = self.result.producer
        assert producer is not None
        wanted = [value for value in self.other_results if read is None or value in read]
        return Node(
            self.operator,
            {},
            self.operands,
            [self.result, *wanted],
            producer.equation,
            producer.name_stack,
            functools.partial(self.call, wanted),
        )


@dataclasses.dataclass(frozen=True)
class RefusedMatch:
    """A normalisation that is not fused.

    Attributes:
        node: the node that normalises the array.
        reason: why it is refused, for the report.
        region: what is understood of it, or None if nothing is.
        is_used_elsewhere: whether the only obstacle is that something else reads one of its arrays.
        nodes: what it is computed by, as far as that was looked at; empty if there is a region.
    """

    node: Node
    reason: str
    region: Region | None = None
    is_used_elsewhere: bool = False
    nodes: frozenset[Node] = frozenset()


def summed(residuals: Sequence[jax.Array]) -> jax.Array:
    """The sum of the residuals, which an operator takes as one array."""
    return functools.reduce(operator.add, residuals)
