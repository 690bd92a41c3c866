"""Convolutions and matrix products with a weight, and the axes along which both have channels."""

import dataclasses

from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.nodes import Node, Operand, Value

# The primitives that are linear in a weight, and what a report calls them.
WEIGHTED_SUMS = {"conv_general_dilated": "convolution", "dot_general": "matrix product"}


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """A node that is linear in a weight: a convolution, transposed or not, or a matrix product.

    Attributes:
        node: the node.
        weight: the position of the weight among its operands.
        channels: for an axis of the result, the axis of the weight that runs along with it. A
            factor along the one is a factor along the other.
    """

    node: Node
    weight: int
    channels: dict[int, int]

    @property
    def result(self) -> Value:
        return self.node.outputs[0]

    @property
    def array(self) -> Operand:
        """The operand that is not the weight."""
        return self.node.operands[1 - self.weight]


def weighted_sum(node: Node, given: set[Value]) -> WeightedSum | None:
    """The node as a weighted sum, if exactly one of its operands is given, which is the weight.

    `given` are the values that are computed from the variables and from literals alone.
    """
    if node.name not in _CHANNELS or not is_real(node.outputs[0].dtype):
        return None
    are_given = [not isinstance(operand, Value) or operand in given for operand in node.operands]
    if sum(are_given) != 1:
        return None
    weight = are_given.index(True)
    if not is_real(node.operands[weight].dtype):
        return None  # Integers cannot hold the factor.
    channels = _CHANNELS[node.name](node, weight)
    return WeightedSum(node, weight, channels) if channels else None


def _of_convolution(node: Node, weight: int) -> dict[int, int]:
    if weight != 1:
        return {}
    numbers = node.params["dimension_numbers"]
    # With groups as well, the kernel has all features of the result along one axis.
    return {numbers.out_spec[1]: numbers.rhs_spec[0]}


def _of_product(node: Node, weight: int) -> dict[int, int]:
    contracted, batch = node.params["dimension_numbers"]
    free = [
        [axis for axis in range(len(operand.shape)) if axis not in (*contracted[i], *batch[i])]
        for i, operand in enumerate(node.operands)
    ]
    # The axes of the result: those of the batch, those of the left operand, those of the right one.
    first = len(batch[0]) + (len(free[0]) if weight == 1 else 0)
    return {first + i: axis for i, axis in enumerate(free[weight])}


_CHANNELS = dict(zip(WEIGHTED_SUMS, (_of_convolution, _of_product), strict=True))
