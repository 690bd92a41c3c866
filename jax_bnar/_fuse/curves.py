"""Which nodes compute an activation of `jax.nn` other than ReLU, in value and in derivative.

A leaky ReLU, SiLU and hard SiLU are recognised by the operations of which they consist: whoever
writes these computes the same. ReLU6 has a derivative of its own, so its rule is compared.
"""

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from jax_bnar._base import jax_compat
from jax_bnar._base.activations import FusedActivation
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Constant, Node, Operand, Value, source

_CUSTOM_JVP = "custom_jvp_call"


class CurveMatch(NamedTuple):
    """An activation and the value that it gives."""

    activation: FusedActivation
    result: Value


def curve_of(graph: Graph, value: Value) -> CurveMatch | None:
    """The activation into which a value goes and nowhere else, if it is one of these."""
    if value in graph.returned or not is_real(value.dtype):
        return None
    readers = graph.readers(value)
    if len(readers) == 1 and _is_relu6(readers[0]):
        return _match(value, "relu6", readers[0])
    if len(readers) == 2:
        return _product(graph, value, readers)
    if len(readers) == 3:
        return _leaky_relu(graph, value, readers)
    return None


def _match(value: Value, name: Any, last: Node, negative_slope: float = 0.0) -> CurveMatch | None:
    (result,) = last.outputs
    if result.shape != value.shape or result.dtype != value.dtype:
        return None
    return CurveMatch(FusedActivation(name, negative_slope), result)


def _product(graph: Graph, value: Value, readers: Collection[Node]) -> CurveMatch | None:
    """value * sigmoid(value), or value * relu6(value + 3)/6."""
    for product in readers:
        if product.name != "mul" or len(product.inputs) != 2 or value not in product.inputs:
            continue
        (other,) = (reader for reader in readers if reader is not product)
        (factor,) = [o for o in product.inputs if o is not value] or [None]
        if other.name == "logistic" and _is_chain(graph, [other], factor):
            return _match(value, "silu", product)
        if other.name == "add" and _number(other, value) == 3:
            chain = [other]
            while len(chain) < 3 and (node := graph.sole_reader(chain[-1].outputs[0])):
                chain.append(node)
            if (
                len(chain) == 3
                and _is_relu6(chain[1])
                and chain[2].name == "div"
                and chain[2].inputs[0] is chain[1].outputs[0]
                and _number(chain[2], chain[1].outputs[0]) == 6
                and _is_chain(graph, chain, factor)
            ):
                return _match(value, "hard_silu", product)
    return None


def _is_chain(graph: Graph, chain: Collection[Node], end: Any) -> bool:
    """Whether each node's result is read once, and the last one's is `end`."""
    *_, last = chain
    alone = (graph.sole_reader(node.outputs[0]) is not None for node in chain)
    return all(alone) and end is last.outputs[0]


def _leaky_relu(graph: Graph, value: Value, readers: Collection[Node]) -> CurveMatch | None:
    """where(value >= 0, value, slope * value), with a slope that the operators take."""
    by_name = {node.name: node for node in readers}
    if set(by_name) != {"ge", "mul", "select_n"}:
        return None
    compared, scaled, chosen = by_name["ge"], by_name["mul"], by_name["select_n"]
    slope = _number(scaled, value)
    is_positive = compared.inputs[0] is value and _number(compared, value) == 0
    expected = [compared.outputs[0], scaled.outputs[0], value]
    if (
        not is_positive
        or slope is None
        or not 0 <= slope < 1
        or len(chosen.inputs) != 3
        or any(a is not b for a, b in zip(chosen.inputs, expected, strict=True))
        or graph.sole_reader(compared.outputs[0]) is None
        or graph.sole_reader(scaled.outputs[0]) is None
    ):
        return None
    return _match(value, "leaky_relu", chosen, float(slope))


def _number(node: Node, value: Value) -> Any:
    """The number that is the other operand of a node, or None."""
    others: list[Operand] = [operand for operand in node.inputs if operand is not value]
    if len(others) != 1:
        return None
    origin, _ = source(others[0])
    if not isinstance(origin, Constant) or origin.shape != () or not is_real(origin.dtype):
        return None
    return float(origin.value)


def _is_relu6(node: Node) -> bool:
    if node.name != _CUSTOM_JVP or len(node.inputs) != 1:
        return False
    rule = jax_compat.derivative_rule_of(node.equation)
    return rule is not None and rule is _rule_of_relu6()


@functools.cache
def _rule_of_relu6() -> Any:
    nodes = Graph(jax.make_jaxpr(jax.nn.relu6)(0.0).jaxpr).nodes
    rules = (jax_compat.derivative_rule_of(n.equation) for n in nodes if n.name == _CUSTOM_JVP)
    return next(rules, None)
