"""`jax_bnar.batch_norm` itself, with an addition or a ReLU after it that it could have computed.

A model has such calls after `convert_batch_norms`, or after a swap of the import alone.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.nodes import Node, Operand, Value
from jax_bnar._fuse.tail import Tail, tail_of

# The primitives in the bodies of the two calls (implementation="ffi" demands the kernel), and the
# names of their operands.
_TRAINING, _INFERENCE = "bnar_forward", ("bnar_inference", "bnar_normalise")
_OPERANDS = ("x", "z", "scale", "bias", "mean", "var")


@dataclasses.dataclass(frozen=True)
class OwnCall:
    """A call of `batch_norm` or `batch_norm_inference`.

    Attributes:
        x: the array that is normalised.
        vectors: scale and bias, then mean and var if they are given; None for one that is absent.
        options: the keywords of the public function.
        results: y, then mean and var if they are computed.
    """

    x: Value
    vectors: tuple[Operand | None, ...]
    options: Mapping[str, Any]
    results: tuple[Value, ...]

    @property
    def is_inference(self) -> bool:
        return len(self.vectors) == 4


@dataclasses.dataclass(frozen=True)
class OwnMatch:
    """One or two calls (whose results are added), with what follows them."""

    calls: tuple[OwnCall, ...]
    tail: Tail

    @property
    def x(self) -> Value:
        return self.calls[0].x

    @property
    def normalised(self) -> Value:
        return self.calls[0].results[0]

    @property
    def result(self) -> Value:
        return self.tail.result

    @property
    def operator(self) -> str:
        if len(self.calls) == 2:
            return "dual_bn_add_relu"
        name = "bn_add_relu" if self.tail.residuals else "bn_relu"
        return f"{name}_inference" if self.calls[0].is_inference else name

    @property
    def statistics(self) -> list[Value]:
        return [value for call in self.calls for value in call.results[1:]]

    @property
    def replaced(self) -> list[Value]:
        return [self.result, *self.statistics]


def own_candidates(
    graph: Graph, node: Node, taken: Collection[Value]
) -> list[OwnMatch | RefusedMatch]:
    """The matches that begin with this node, the best first, or the reason why there is none."""
    call = own_call(node)
    if call is None or call.results[0] in taken:
        return []
    tail = tail_of(graph, call.results[0], taken)
    if not tail.has_relu:
        if not tail.reason:
            return []
        return [RefusedMatch(node, f"it is an operator of jax_bnar already; {tail.reason}")]
    found: list[OwnMatch | RefusedMatch] = [OwnMatch((call,), tail)]
    if len(tail.residuals) == 1 and (producer := tail.residuals[0].producer) is not None:
        other = own_call(producer)
        if other is not None and graph.sole_reader(tail.residuals[0]) and _agree(call, other):
            found.insert(0, OwnMatch((call, other), dataclasses.replace(tail, residuals=())))
    return found


def own_call(node: Node) -> OwnCall | None:
    """The call that a node is, if it has no residual and no activation."""
    if node.name == "jax_bnar_named":
        return _synchronised(node)
    if node.name != "custom_jvp_call":
        return None
    body = node.params["call_jaxpr"].jaxpr
    if len(body.eqns) != 1 or body.eqns[0].invars != body.invars:
        return None
    (equation,) = body.eqns
    params, name = equation.params, equation.primitive.name
    if name not in (_TRAINING, *_INFERENCE) or params["activation"] != "none":
        return None
    waiting = iter(node.inputs)
    given = {
        operand: next(waiting) if is_present else None
        for operand, is_present in zip(_OPERANDS, params["present"], strict=False)
    }
    options = {"epsilon": params["epsilon"], "implementation": params["implementation"]}
    if name == _TRAINING:
        options["num_groups"] = params["layout"].num_groups
    elif given["mean"] is None:
        return None  # a BatchNorm that was folded into a convolution
    vectors = tuple(vector for operand, vector in given.items() if operand not in ("x", "z"))
    return _call(node, given["x"], given["z"], vectors, params["layout"], options)


def _synchronised(node: Node) -> OwnCall | None:
    function = node.params["function"]
    config: Any = getattr(function, "config", None)
    if config is None or getattr(config, "activation", None) != "none":
        return None
    x, z, scale, bias = jax.tree.unflatten(node.params["tree"], node.inputs)
    options = {
        "epsilon": config.epsilon,
        "implementation": config.implementation,
        "num_groups": config.layout.num_groups,
        "axis_name": function.names,
        "axis_index_groups": function.groups,
    }
    return _call(node, x, z, (scale, bias), config.layout, options)


def _call(
    node: Node,
    x: Operand | None,
    z: Operand | None,
    vectors: tuple[Operand | None, ...],
    layout: Any,
    options: Mapping[str, Any],
) -> OwnCall | None:
    # The public functions do not take the leading axes that a vmap around the call has added.
    if not isinstance(x, Value) or z is not None or layout.leading:
        return None
    return OwnCall(x, vectors, {**options, "axis": layout.axis}, tuple(node.outputs))


def _agree(first: OwnCall, second: OwnCall) -> bool:
    """Whether one call can compute both."""
    if first.is_inference or second.is_inference:
        return False
    return first.options == second.options and first.x.dtype == second.x.dtype
