"""Which nodes compute an activation of `jax.nn` other than ReLU, in value and in derivative.

Each of these functions is traced once, and the nodes that follow a value are compared with it. So
whoever writes the same operations gets the same operator, and a later version of JAX that writes
them in another way is followed.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from jax_bnar._base import jax_compat
from jax_bnar._base.activations import Activation, FusedActivation, takes_slope
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Constant, Node, Operand, Value, source

# Stands for any slope; every dtype can represent it, and no function has it as a constant.
_ANY_SLOPE: Final = 0.4375


def _elu_without_alpha(u: jax.Array) -> jax.Array:
    zero = jnp.zeros_like(u)
    return jnp.where(u > 0, u, jnp.expm1(jnp.where(u > 0, zero, u)))


def _gelu_from_the_left(u: jax.Array) -> jax.Array:
    return 0.5 * u * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


# As jax.nn.gelu(approximate=False), without the copy of the result at its end.
def _exact_gelu_by_erfc(u: jax.Array) -> jax.Array:
    return 0.5 * u * jax.lax.erfc(-u * math.sqrt(0.5))


def _exact_gelu_by_erf(u: jax.Array) -> jax.Array:
    return 0.5 * u * (1 + jax.lax.erf(u / math.sqrt(2)))


def _hard_silu_from_the_left(u: jax.Array) -> jax.Array:
    return u * jax.nn.relu6(u + 3) / 6


# By their names, then other ways to write them.
_FUNCTIONS: Final[tuple[tuple[Activation, Callable[[jax.Array], jax.Array]], ...]] = (
    ("relu6", jax.nn.relu6),
    ("leaky_relu", functools.partial(jax.nn.leaky_relu, negative_slope=_ANY_SLOPE)),
    ("silu", jax.nn.silu),
    ("hard_silu", jax.nn.hard_silu),
    ("elu", jax.nn.elu),
    ("gelu", functools.partial(jax.nn.gelu, approximate=True)),
    ("exact_gelu", functools.partial(jax.nn.gelu, approximate=False)),
    ("mish", jax.nn.mish),
    ("elu", _elu_without_alpha),
    ("gelu", _gelu_from_the_left),
    ("exact_gelu", _exact_gelu_by_erfc),
    ("exact_gelu", _exact_gelu_by_erf),
    ("hard_silu", _hard_silu_from_the_left),
)
_COMMUTATIVE: Final = frozenset(["add", "mul", "max", "min"])


class CurveMatch(NamedTuple):
    """An activation and the value that it gives."""

    activation: FusedActivation
    result: Value


class _Pattern(NamedTuple):
    """What a function of an array computes."""

    argument: Value
    last: Node
    names: frozenset[str]
    size: int


def curve_of(graph: Graph, value: Value) -> CurveMatch | None:
    """The activation into which a value goes and nowhere else, if it is one of these."""
    if value in graph.returned or not is_real(value.dtype):
        return None
    for name, function in _FUNCTIONS:
        pattern = _pattern(function, value.dtype)
        for last in _candidates(graph, value, pattern):
            comparison = _Comparison(pattern.argument, value)
            if not comparison.is_same(pattern.last, last):
                continue
            slope = comparison.slope or 0.0  # also for -0.0
            if takes_slope(slope) and comparison.is_all_that_reads(graph, last):
                return CurveMatch(FusedActivation(name, slope), last.outputs[0])
    return None


@functools.cache
def _pattern(function: Callable[[jax.Array], jax.Array], dtype: Any) -> _Pattern:
    def traced() -> Any:
        with jax.enable_x64(dtype == jnp.float64):
            return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2,), dtype)).jaxpr

    # In a thread of its own, because the mesh and the configuration that are set where the first
    # program is traced belong to its thread, and the pattern serves all others as well.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        graph = Graph(thread.submit(traced).result())
    (result,) = graph.outputs
    assert isinstance(result, Value), function
    assert result.producer is not None, function
    names = [node.name for node in graph.nodes]
    return _Pattern(graph.inputs[0], result.producer, frozenset(names), len(names))


def _candidates(graph: Graph, value: Value, pattern: _Pattern) -> Iterator[Node]:
    """The nodes that may be the last of the pattern, the nearest ones first."""
    values = [value]
    reached: dict[Node, None] = {}
    for _ in range(pattern.size):
        readers = (node for each in values for node in graph.readers(each))
        new = {node: None for node in readers if node.name in pattern.names and node not in reached}
        reached |= new
        values = [output for node in new for output in node.outputs]
        yield from (node for node in new if node.name == pattern.last.name)


class _Comparison:
    """Compares nodes of a program with those of a pattern, from the last one back.

    Attributes:
        slope: what the program has in the place of `_ANY_SLOPE`.
    """

    def __init__(self, argument: Value, value: Value) -> None:
        self.slope: float | None = None
        self._argument = argument
        self._value = value
        self._same: set[Node] = set()

    def is_same(self, expected: Node, node: Node) -> bool:
        if (
            node.name != expected.name
            or len(node.inputs) != len(expected.inputs)
            or len(node.outputs) != 1
            or node.outputs[0].shape != self._value.shape
            or node.outputs[0].dtype != expected.outputs[0].dtype
            or not _have_same_parameters(expected, node)
        ):
            return False
        orders = [node.inputs]
        if node.name in _COMMUTATIVE:
            orders.append(node.inputs[::-1])
        before, slope = self._same, self.slope
        for operands in orders:
            self._same, self.slope = before | {node}, slope
            if all(map(self._is_same_operand, expected.inputs, operands)):
                return True
        self._same, self.slope = before, slope
        return False

    def is_all_that_reads(self, graph: Graph, last: Node) -> bool:
        """Whether the value, and what lies between it and the last node, is read nowhere else."""
        between = [node.outputs[0] for node in self._same if node is not last]
        return not graph.returned.intersection(between) and all(
            self._same.issuperset(graph.readers(value)) for value in (self._value, *between)
        )

    def _is_same_operand(self, expected: Operand, operand: Operand) -> bool:
        if expected is self._argument:
            return operand is self._value
        number = _number(expected)
        if number is not None:
            given = _number(operand)
            if number == _ANY_SLOPE and given is not None and self.slope in (None, given):
                self.slope = given
                return True
            return given == number
        if not isinstance(expected, Value) or not isinstance(operand, Value):
            return False
        first, second = expected.producer, operand.producer
        return first is not None and second is not None and self.is_same(first, second)


def _number(operand: Operand) -> float | None:
    """The number that an operand is everywhere, or None. A symbolic size is none."""
    origin, _ = source(operand)
    if not isinstance(origin, Constant) or origin.shape != () or not is_real(origin.dtype):
        return None
    return None if is_symbolic_dim(origin.value) else float(origin.value)


def _have_same_parameters(expected: Node, node: Node) -> bool:
    if node.name == "custom_jvp_call":
        rule = jax_compat.derivative_rule_of(expected.equation)
        return rule is not None and rule is jax_compat.derivative_rule_of(node.equation)
    return node.params == expected.params
