"""Which nodes are `jax.nn.relu`, in value and in derivative, also at 0 and at NaN.

Other spellings agree with it at most inputs and differ at some: the derivative of `jnp.maximum(a,
0)` at 0 is 1/2, that of `where(a < 0, 0, a)` is 1, `where(a > 0, a, 0)` turns NaN into 0, and `a *
(a > 0)` turns -inf into NaN. A zero-initialised scale makes exact zeros common. Such spellings
therefore stay as they are, after a fused BatchNorm. A custom derivative rule is compared as a
whole, because a surrogate gradient has the body of ReLU and another derivative.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jax_bnar._base import jax_compat
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Constant, Node, Operand, Value, seen, source

_CUSTOM_JVP = "custom_jvp_call"
# No spelling of ReLU's derivative has more operations than this.
_LARGEST_RULE = 20


def is_relu(node: Node) -> bool:
    if node.name != _CUSTOM_JVP or len(node.inputs) != 1 or len(node.outputs) != 1:
        return False
    if not is_real(node.outputs[0].dtype):
        return False
    if node.params["call_jaxpr"].consts or not _has_body_of_relu(node):
        return False

    aval = node.inputs[0].aval
    rule = jax_compat.derivative_rule_of(node.equation)
    if rule is not None and rule is _rule_of_relu():
        return True  # nearly always the case, and nothing has to be traced
    try:
        return _derivative(lambda a: node.run(a)[0], aval) == _derivative(jax.nn.relu, aval)
    except TypeError:
        return False  # it cannot be traced outside the shard_map in which it stands


@functools.cache
def _rule_of_relu() -> Any:
    nodes = Graph(jax.make_jaxpr(jax.nn.relu)(0.0).jaxpr).nodes
    rules = (jax_compat.derivative_rule_of(n.equation) for n in nodes if n.name == _CUSTOM_JVP)
    return next(rules, None)


def looks_like(graph: Graph, node: Node) -> Literal["relu", "relu6", None]:
    """Of which of these functions of `jax.nn` a node begins another spelling; for the report."""
    if node.name != "max" or not any(_is_number(operand, 0) for operand in node.inputs):
        return None
    after = graph.sole_reader(node.outputs[0])
    if after is None or after.name != "min":
        return "relu"
    return "relu6" if any(_is_number(operand, 6) for operand in after.inputs) else None


def is_selection_by_sign(readers: Sequence[Node]) -> bool:
    """`where(a > 0, a, 0)` and what is like it, such as a leaky ReLU; for the report."""
    names = {node.name for node in readers}
    return bool(names & {"gt", "ge", "lt", "le"}) and names <= {
        "gt", "ge", "lt", "le", "mul", "select_n"
    }  # fmt: skip


def _has_body_of_relu(node: Node) -> bool:
    graph = Graph(node.params["call_jaxpr"].jaxpr)
    # Leaves out the nodes that make the 0.
    nodes = [n for n in graph.nodes if n.has_effects or any(v.shape for v in n.outputs)]
    if len(nodes) != 1 or nodes[0].name != "max" or graph.outputs != nodes[0].outputs:
        return False
    left, right = nodes[0].inputs
    (a,) = graph.inputs
    return (left is a and _is_number(right, 0)) or (right is a and _is_number(left, 0))


def _is_number(operand: Any, number: int) -> bool:
    origin, _ = source(operand)
    return isinstance(origin, Constant) and origin.shape == () and origin.value == number


def _derivative(function: Any, aval: Any) -> str:
    """Value and tangent of a function, as expressions in a and its tangent."""

    def tangent(a: jax.Array, a_dot: jax.Array) -> Any:
        return jax.jvp(function, (a,), (a_dot,))

    graph = Graph(jax.make_jaxpr(tangent)(aval, aval).jaxpr)
    if len(graph.nodes) > _LARGEST_RULE:
        return f"a program of {len(graph.nodes)} operations"
    names = dict(zip(graph.inputs, ("a", "a_dot"), strict=True))
    return "; ".join(_expression(output, names) for output in graph.outputs)


def _expression(operand: Operand, names: Mapping[Value, str]) -> str:
    """The expression that computes a value, without broadcasts of constants and without calls."""
    operand = seen(operand)
    origin, _ = source(operand)
    if isinstance(origin, Constant):
        return str(origin.value)
    assert isinstance(operand, Value)
    if operand in names:
        return names[operand]
    node = operand.producer
    assert node is not None
    inputs = [_expression(o, names) for o in node.inputs]
    if node.name == "pvary":
        return inputs[0]
    if node.name == _CUSTOM_JVP:
        graph = Graph(node.params["call_jaxpr"].jaxpr)
        inner = dict(zip(graph.inputs, inputs, strict=True))
        return _expression(graph.outputs[node.outputs.index(operand)], inner)
    params = {k: v for k, v in node.params.items() if k != "sharding"}
    return f"{node.name}{params or ''}({', '.join(inputs)})"
