"""A jaxpr as a graph of nodes, with the small jitted functions in it inlined."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend import core

from jax_bnar._base import jax_compat
from jax_bnar._fuse.constant_folding import fold
from jax_bnar._fuse.failures import Failure, caught
from jax_bnar._fuse.nodes import Constant, Node, Operand, Value, seen, values_of


class Graph:
    """The nodes of one jaxpr that run, in its order, and the nodes that read each value.

    Readers are those that recognition sees: `Node.inputs`, not `Node.operands`. `axis_sizes` has
    the sizes of the mapped axes in scope, which constants may depend on. `known` has the numbers
    among the arrays that the program holds. `opens` gives, for the calls around an equation and the
    equation itself, its body if that is inlined although it is not small.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        axis_sizes: Mapping[Any, int] = MappingProxyType({}),
        known: Mapping[Any, Constant] = MappingProxyType({}),
        opens: Callable[[tuple[Any, ...]], core.Jaxpr | None] = lambda calls: None,
    ) -> None:
        self.nodes: list[Node] = []
        self.failures: list[Failure] = []
        self.jaxpr = jaxpr
        self._axis_sizes = axis_sizes
        self._known = known
        self._opens = opens
        variables = (*jaxpr.constvars, *jaxpr.invars)
        self.inputs = [Value(v.aval, known=known.get(v)) for v in variables]
        self.outputs = self._add(jaxpr, self.inputs, None, ())
        self.nodes = _needed(self.nodes, self.outputs)
        self.users: dict[Value, list[Node]] = {}
        for order, node in enumerate(self.nodes):
            node.order = order
            if node.outputs and all(value.known is not None for value in node.outputs):
                continue  # Its readers read what is known instead.
            for operand in node.inputs:
                if isinstance(operand, Value):
                    users = self.users.setdefault(operand, [])
                    if not users or users[-1] is not node:
                        users.append(node)
        self.returned = set(values_of(map(seen, self.outputs)))

    def opened(self, opens: Callable[[tuple[Any, ...]], core.Jaxpr | None]) -> "Graph":
        """The graph of the same jaxpr, in which other calls are inlined as well."""
        return Graph(self.jaxpr, self._axis_sizes, self._known, opens)

    def _add(
        self,
        jaxpr: core.Jaxpr,
        inputs: Sequence[Operand],
        name_stack: Any,
        calls: tuple[Any, ...],
    ) -> list[Operand]:
        env: dict[Any, Operand] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(atom: Any) -> Operand:
            return Constant(atom.aval, atom.val) if isinstance(atom, core.Literal) else env[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            stack = equation.source_info.name_stack
            stack = stack if name_stack is None else name_stack + stack
            inner = None
            with caught(self.failures):
                inner = inlinable(equation) or self._opens((*calls, equation))
            if inner is not None:
                results = self._add(inner, operands, stack, (*calls, equation))
            else:
                results = self._append(equation, operands, stack, calls)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _append(
        self, equation: Any, operands: list[Operand], stack: Any, calls: tuple[Any, ...]
    ) -> list[Value]:
        node = Node(
            _name(equation),
            equation.params,
            operands,
            [Value(v.aval) for v in equation.outvars],
            equation,
            stack,
            jax_compat.binder(equation),
            has_effects=jax_compat.has_effects(equation.effects),
            calls=calls,
        )
        for value in node.outputs:
            value.producer = node
        with caught(self.failures, node):
            known = fold(equation, node.inputs, self._axis_sizes)
            for value, equal in zip(node.outputs, known, strict=False):
                value.known = equal
        self.nodes.append(node)
        return node.outputs

    def readers(self, value: Value) -> list[Node]:
        return self.users.get(value, [])

    def sole_reader(self, value: Value) -> Node | None:
        """The only node that reads the value, or None; also None if the program returns it."""
        readers = self.readers(value)
        return readers[0] if len(readers) == 1 and value not in self.returned else None


def _needed(nodes: Sequence[Node], outputs: Sequence[Operand]) -> list[Node]:
    """The nodes with effects, and those whose results they or the program's results depend on.

    What nobody reads would otherwise be one more reader of an array: tf2jax computes statistics in
    evaluation, too, and drops them.
    """
    wanted = set(values_of(outputs)) | set(values_of(map(seen, outputs)))
    needed: list[Node] = []
    for node in reversed(nodes):
        if node.has_effects or not wanted.isdisjoint(node.outputs):
            needed.append(node)
            wanted.update(values_of(node.operands), values_of(node.inputs))
    return needed[::-1]


def _name(equation: Any) -> str:
    """The name by which recognition knows a primitive."""
    if equation.primitive.name == "reshape":
        order = equation.params["dimensions"]
        # It transposes first (`jnp.reshape(order="F")`), which the shapes alone do not show.
        if order is not None and list(order) != sorted(order):
            return "transposing_reshape"
    return equation.primitive.name


# The primitives that occur in functions which jax.numpy and the libraries wrap in jit, such as
# `_var`, `_where`, `clip` and `standardize`. A function that contains anything else (a convolution,
# a loop) stays a call.
_INLINED = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp concatenate convert_element_type copy copy_p
    dim_as_value div eq exp expand_dims expm1 ge gt integer_pow is_finite le log logistic lt max min
    mul ne neg not or pow psum psum_invariant pvary reduce_max reduce_min reduce_sum reshape rsqrt
    select_n sign slice split sqrt square squeeze stack stop_gradient sub tanh transpose unstack
    """.split()  # noqa: SIM905 (a list would fill a page)
)
_LARGEST_INLINED = 60


def inlinable(equation: Any) -> core.Jaxpr | None:
    """The body of a small jitted function, if inlining it loses nothing but the call."""
    body = openable(equation)
    if body is None:
        return None
    return body if len(body.eqns) <= _LARGEST_INLINED and all(map(_is_small, body.eqns)) else None


def openable(equation: Any) -> core.Jaxpr | None:
    """The body of a jitted function of any size, if inlining it loses nothing but the call."""
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    closed = equation.params["jaxpr"]
    if (
        closed.consts
        or jax_compat.has_effects(closed.effects)
        or not jax_compat.is_plain_jit(equation.params)
    ):
        return None
    return closed.jaxpr


def _is_small(equation: Any) -> bool:
    name = equation.primitive.name
    return name in _INLINED or name == "custom_jvp_call" or inlinable(equation) is not None
