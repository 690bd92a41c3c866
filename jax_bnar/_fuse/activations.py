"""Names an activation that follows a normalised array and is not fused, for the report.

Nothing is fused because of a name: `relu.py` compares values and derivatives, and `curves.py`
operations.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax

from jax_bnar._base import jax_compat
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Value, is_broadcast, values_of

_CUSTOM_DERIVATIVES: Final = ("custom_jvp_call", "custom_vjp_call")
# What is left of activations that JAX does not wrap in jit, by the function in them.
_SELF_GATED: Final = {"logistic": "silu", "tanh": "gelu", "erf": "gelu", "erfc": "gelu"}
# The other operations of such an activation, and how many values are looked at.
_STEPS: Final = frozenset(["add", "convert_element_type", "integer_pow", "mul", "neg", "sub"])
_MOST_VALUES: Final = 20


def name_of(value: Value, readers: Sequence[Node]) -> str:
    """The function of `jax.nn` in which a value is read, such as "leaky_relu"; "" if there is none.

    JAX jits most of these functions under their names, and inlining keeps the calls.
    """
    around = () if value.producer is None else value.producer.calls
    calls = [reader.calls[_common(around, reader.calls) :] for reader in readers]
    shared = calls[0][: min(_common(calls[0], each) for each in calls)]
    names = [call.params.get("name", "") for call in shared]
    if len(readers) == 1 and readers[0].name in _CUSTOM_DERIVATIVES:
        names.append(name_of_custom(readers[0]))
    return next((name for name in names if _is_another_activation(name)), "")


def name_of_custom(node: Node) -> str:
    """The name of a function with a derivative of its own; "" if JAX does not know it."""
    body = node.params.get("call_jaxpr")
    if body is None:
        return ""
    equations = jax_compat.open_jaxpr(body).eqns
    if len(equations) == 1 and equations[0].primitive.name in ("jit", "pjit"):
        return equations[0].params["name"]
    return jax_compat.function_name(body)


def self_gated_name(graph: Graph, value: Value) -> str:
    """The activation of the form a * f(a) into which a value a goes; "" if there is none.

    Only the function f is looked at, so the name is that of the best known activation with it.
    """
    names: set[str] = set()
    waiting, derived = [value], {value}
    is_product = False
    while waiting and len(derived) < _MOST_VALUES:
        for node in graph.readers(waiting.pop(0)):
            if node.name not in _SELF_GATED and node.name not in _STEPS:
                continue
            if any(
                operand not in derived and not is_broadcast(operand, node.outputs[0])
                for operand in values_of(node.inputs)
            ):
                continue  # Another array comes in, so what follows is not a function of a.
            names.add(node.name)
            operands = list(values_of(node.inputs))
            is_product |= node.name == "mul" and len(operands) == 2 and derived.issuperset(operands)
            for result in node.outputs:
                if result not in derived:
                    derived.add(result)
                    waiting.append(result)
    return next((_SELF_GATED[name] for name in _SELF_GATED if is_product and name in names), "")


def _is_another_activation(name: str) -> bool:
    return name != "relu" and callable(getattr(jax.nn, name, None))


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many calls two sequences have in common, from the outside."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a is not b), min(len(first), len(second)))
