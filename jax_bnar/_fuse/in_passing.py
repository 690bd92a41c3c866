"""What XLA computes in the loop that reads it, so that it need not be in memory.

An operator reads its array from memory. If that array is not there anyway, the operator costs the
pass that writes it.
"""

from collections.abc import Collection
from typing import Any

from jax_bnar._base import jax_compat
from jax_bnar._fuse.nodes import Node, Value, array_and_vector

# If one of these computes x, XLA computes x in the same pass as what follows; a separate operator
# would force x to be written first. "add" is missing because it joins the blocks of a network.
FUSED_BY_XLA = frozenset(
    """
    sub mul div neg exp log tanh logistic max min select_n rsqrt integer_pow square
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
_ELEMENTWISE = FUSED_BY_XLA | frozenset(
    """
    abs broadcast_in_dim cbrt ceil clamp convert_element_type cos erf erf_inv erfc exp2 expm1 floor
    iota log1p pow round sign sin sqrt tan
    """.split()  # noqa: SIM905
)
# These neither compute nor move anything.
_VIEWS = frozenset(
    """
    copy expand_dims pvary reshape squeeze stop_gradient
    """.split()  # noqa: SIM905
)
# The calls that XLA inlines, with the parameter that holds their body.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def computed_in_passing(x: Value, written: Collection[Value]) -> Node | None:
    """The node that computes x in the loop that reads it; None if x is in memory in any case.

    `written` holds the values that operators write to memory.
    """
    while x not in written and (node := x.producer) is not None:
        if node.name in _VIEWS and isinstance(node.inputs[0], Value):
            x = node.inputs[0]
            continue
        adds_to_all = node.name == "add" and array_and_vector(node) is not None
        return node if adds_to_all or _is_elementwise(node.equation) else None
    return None


def _is_elementwise(equation: Any) -> bool:
    name = equation.primitive.name
    if name not in _CALLS:
        return name in _ELEMENTWISE or name in _VIEWS
    body = jax_compat.open_jaxpr(equation.params[_CALLS[name]])
    return all(inner.primitive.name == "add" or _is_elementwise(inner) for inner in body.eqns)
