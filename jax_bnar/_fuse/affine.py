"""Given statistics: `relu(scale * (x - mean) + bias + z)` with vectors of any origin.

This is BatchNorm in evaluation, folded or not. x is found by walking back from the ReLU; how the
program transforms it is then read from the polynomials of its region, as in training. How the
program computes the vectors does not matter.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.activations import RELU
from jax_bnar._base.dtypes import accumulation_dtype, is_wide
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.in_passing import FUSED_BY_XLA
from jax_bnar._fuse.match import Match, RefusedMatch, summed
from jax_bnar._fuse.nodes import (
    Constant,
    Node,
    Operand,
    Value,
    array_and_vector,
    is_broadcast,
    source,
    values_of,
)
from jax_bnar._fuse.polynomial import Polynomial
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.relu import is_relu
from jax_bnar._fuse.sizes import is_at_least, is_long
from jax_bnar._fuse.tail import Tail, refused_residual
from jax_bnar._fuse.training import RefusalError, UsedElsewhereError
from jax_bnar._fuse.unknowns import Foreign
from jax_bnar._fuse.vectors import Vector, arrays_of
from jax_bnar._operators.api import bn_add_relu_inference, bn_relu_inference

# The scale already contains the reciprocal root, so the operators get a variance of 1, and an
# epsilon that leaves it at 1.
_NO_EPSILON = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(eq=False)
class AffineMatch(Match):
    """A ReLU of an affine function of x, with residuals.

    Attributes:
        region: what is computed from x.
        mean: what is subtracted from x first: a polynomial in vectors of the program.
        scale: the factor of the difference.
        bias: what is added to the product.
        axis: the channel axis.
    """

    region: Region
    mean: Polynomial
    scale: Polynomial
    bias: Polynomial
    axis: int

    @property
    def operator(self) -> str:
        return "bn_add_relu_inference" if self.tail.residuals else "bn_relu_inference"

    @property
    def operands(self) -> list[Operand]:
        vectors = [value for vector in self._vectors for value in vector.values]
        return [self.x, *self.tail.residuals, *vectors]

    def call(self, wanted: Collection[Value], *arrays: Any) -> list[jax.Array]:
        del wanted  # nothing is computed but the result
        x, *rest = arrays
        channels, count = x.shape[self.axis], len(self.tail.residuals)
        residuals, rest = rest[:count], rest[count:]
        scale, bias, mean = arrays_of(self._vectors, rest, {self.axis: channels}, x.dtype)
        dtype = accumulation_dtype(x.dtype)
        mean = jnp.zeros(channels, dtype) if mean is None else mean
        var = jnp.ones(channels, dtype)
        options: dict[str, Any] = {"epsilon": _NO_EPSILON, "axis": self.axis}
        if residuals:
            z = summed(residuals).reshape(x.shape)
            y = bn_add_relu_inference(x, z, scale, bias, mean, var, **options)
        else:
            y = bn_relu_inference(x, scale, bias, mean, var, **options)
        return [y.reshape(self.result.shape)]

    @property
    def _vectors(self) -> list[Vector]:
        unknowns = self.region.unknowns
        return [
            Vector.of(self.scale, unknowns, neutral=1),
            Vector.of(self.bias, unknowns, neutral=0),
            Vector.of(self.mean, unknowns, neutral=0),
        ]


# Mean, scale, bias and channel axis.
_Affine = tuple[Polynomial, Polynomial, Polynomial, int]

_STEPS = ("add", "sub", "mul", "div")
# How many values are searched behind a vector for statistics. A vector that is computed from more
# values than this does not count as given.
_MOST_VALUES = 300


def affine_candidate(
    graph: Graph, node: Node, taken: Collection[Value]
) -> AffineMatch | RefusedMatch | None:
    """The match that ends in this node, if it is a ReLU, or the reason why it cannot be matched."""
    if any(output in taken for output in node.outputs) or not is_relu(node):
        return None
    activated = node.inputs[0]
    if not isinstance(activated, Value) or len(activated.shape) < 2:
        return None
    if activated in taken or not is_real(activated.dtype):
        return None
    try:
        return _match(graph, node, activated)
    except RefusalError as refusal:
        is_used_elsewhere = isinstance(refusal, UsedElsewhereError)
        return RefusedMatch(node, str(refusal), is_used_elsewhere=is_used_elsewhere)


def pays(dtype: Any) -> bool:
    """Whether the operator may be faster than what XLA makes of the program, on some platform.

    Only CPUs run a kernel for it; elsewhere it is left to XLA again. XLA's convolutions for CPUs
    compute in float32. Code that XLA compiles itself widens its input in the same pass, but after
    an operator the widening is another pass (1.10 of the time in bfloat16, 0.94 to 1.00 in
    float32).
    """
    return is_wide(dtype)


def _match(graph: Graph, relu: Node, activated: Value) -> AffineMatch | None:
    addends = _addends(graph, activated)
    for i, addend in enumerate(addends):
        found = _affine_of(graph, addend, *_origin(addend))
        if found is None:
            continue
        if graph.sole_reader(activated) is not relu:
            raise UsedElsewhereError("the pre-activation is used elsewhere")
        if (shared := _read_by_others(graph, addend, found[0].x)) is not None:
            # Such as a convolution's output with its bias, which is a shortcut as well.
            found = _affine_of(graph, addend, *_origin(addend, shared))
            if found is None or found[0].x is not shared:
                raise UsedElsewhereError("an array between x and the ReLU is used elsewhere")
        region, affine = found
        if not pays(region.x.dtype):
            raise RefusalError(
                f"evaluation in {region.x.dtype} is at least as fast as XLA compiles it"
            )
        residuals = tuple(addends[:i] + addends[i + 1 :])
        tail = Tail(relu.outputs[0], residuals, RELU)
        return AffineMatch(region.x, addend, tail, region, *affine)
    return None


def _addends(graph: Graph, value: Value) -> list[Value]:
    """The whole arrays of which a value is the sum."""
    found: list[Value] = []
    waiting = [(value, True)]
    while waiting:
        value, is_alone = waiting.pop()
        node = value.producer
        if is_alone and node is not None and (pair := _whole_addends(node)) is not None:
            waiting.extend((v, graph.sole_reader(v) is node) for v in reversed(pair))
        else:
            found.append(value)
    return found


def _whole_addends(node: Node) -> tuple[Value, Value] | None:
    if node.name not in ("add", "add_any"):
        return None
    left, right = node.inputs
    if not isinstance(left, Value) or not isinstance(right, Value):
        return None
    if refused_residual(left, right) or refused_residual(right, left):
        return None
    return left, right


def _origin(end: Value, last: Value | None = None) -> tuple[Value, Operand | None]:
    """x, and the vector that is subtracted from it.

    Walking back from `end`, the first subtraction after a factor is that of the mean. x itself has
    the dtype of `end`, and is `last` or comes after it, if that is given.
    """
    value, mean, is_scaled = end, None, False
    deepest: tuple[Value, Operand | None] = (end, None)
    while value is not last and (node := value.producer) is not None:
        vector = None
        if node.name == "convert_element_type":
            before = node.inputs[0]
        elif (
            node.name in (_STEPS if mean is None else ("add",))
            and (pair := array_and_vector(node)) is not None
        ):
            before, vector = pair
        else:
            break
        if not isinstance(before, Value) or not is_real(before.dtype):
            break
        is_scaled = is_scaled or node.name in ("mul", "div")
        if is_scaled and node.name == "sub" and node.inputs[0] is before:
            mean = vector
        value = before
        if value.dtype == end.dtype:
            deepest = (value, mean)
    return deepest


def _affine_of(
    graph: Graph, end: Value, x: Value, mean: Operand | None
) -> tuple[Region, _Affine] | None:
    """The region of x, and what the end is in it; None if that does not look like a BatchNorm."""
    if x is end:
        return None
    region = Region(graph, x, {})
    affine = _affine(region, end, mean) if end in region.terms else None
    return None if affine is None else (region, affine)


def _affine(region: Region, end: Value, mean: Operand | None) -> _Affine | None:
    """Mean, scale, bias and channel axis, or None if the value does not look like a BatchNorm."""
    unknowns = region.unknowns
    polynomial = region.terms[end].polynomial
    parts = {} if polynomial is None else polynomial.by_power_of(region.x_number)
    if 1 not in parts or set(parts) - {0, 1}:
        return None
    scale, rest = parts[1], parts.get(0, Polynomial.constant(0))
    if not unknowns.are_foreign(scale) or not unknowns.are_foreign(rest):
        return None
    axes = unknowns.polynomial_varies(scale)
    if len(axes) != 1:
        return None
    (axis,) = axes
    if not isinstance(axis, int) or (axis == 0 and is_long(region.x.shape[0])):
        return None
    if unknowns.polynomial_varies(rest) - axes:
        return None
    if region.x.producer is not None and region.x.producer.name in FUSED_BY_XLA:
        return None
    centre = Polynomial.constant(0)
    if mean is not None and (number := _number_of(region, mean)) is not None:
        centre = Polynomial.unknown(number)
    bias = rest + scale * centre
    for vector in (scale, rest):
        for number in vector.unknowns:
            unknown = unknowns[number]
            if isinstance(unknown, Foreign) and _is_statistic(unknown.value, region.x):
                return None
    return centre, scale, bias, axis


def _number_of(region: Region, operand: Operand) -> int | None:
    origin, _ = source(operand)
    if isinstance(origin, Constant):
        return None
    for number in range(len(region.unknowns)):
        unknown = region.unknowns[number]
        if isinstance(unknown, Foreign) and unknown.value is origin:
            return number
    return None


def _is_statistic(value: Value, x: Value) -> bool:
    """Whether a vector is computed from x or from an array as large, as statistics in training are.

    A ReLU with such a vector must not be matched as evaluation.
    """
    size_of_x = math.prod(x.shape)
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        if len(seen) > _MOST_VALUES or (
            size_of_x != 1 and is_at_least(math.prod(value.shape), size_of_x)
        ):
            return True
        if value.producer is not None:
            for operand in values_of(value.producer.inputs):
                if operand not in seen:
                    seen.add(operand)
                    waiting.append(operand)
    return False


def _read_by_others(graph: Graph, end: Value, x: Value) -> Value | None:
    """The array between x and the end, the nearest to the end, that something else reads too."""
    value = end
    while value is not x:
        node = value.producer
        assert node is not None
        before = next(
            operand
            for operand in node.inputs
            if isinstance(operand, Value) and not is_broadcast(operand, value)
        )
        if before is not x and graph.sole_reader(before) is not node:
            return before
        value = before
    return None
