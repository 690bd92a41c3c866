"""`jax_bnar.batch_norm` itself, with an addition or an activation after it that it could compute.

A model has such calls after `convert_batch_norms`, or after a swap of the import alone. `own_form`
also tells folding which equations are operators of this package.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import jax

from jax_bnar._autodiff.inference import inference
from jax_bnar._autodiff.synchronised import Synchronised
from jax_bnar._autodiff.training import training
from jax_bnar._base import jax_compat
from jax_bnar._base.activations import may_widen
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import Match, RefusedMatch, summed
from jax_bnar._fuse.nodes import Node, Operand, Value
from jax_bnar._fuse.tail import tail_of
from jax_bnar._operators.activated import bn_act, bn_act_inference, dual_bn_act
from jax_bnar._operators.api import (
    bn_add_relu,
    bn_add_relu_inference,
    bn_relu,
    bn_relu_inference,
)

# The primitives in the bodies of the two calls (implementation="ffi" demands the kernel), and the
# names of their operands.
_TRAINING, _INFERENCE = "bnar_forward", ("bnar_inference", "bnar_normalise")
_FORMS: Final[dict[str, Literal["training", "inference"]]] = {
    jax_compat.source_of_function(training): "training",
    jax_compat.source_of_function(inference): "inference",
}
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


@dataclasses.dataclass(eq=False)
class OwnMatch(Match):
    """One or two calls (whose results are added), with what follows them."""

    calls: tuple[OwnCall, ...]

    @property
    def operator(self) -> str:
        if len(self.calls) == 2:
            return "dual_bn_add_relu" if self.tail.has_relu else "dual_bn_act"
        name = "bn_add_relu" if self.tail.residuals else "bn_relu"
        if not self.tail.has_relu:
            name = "bn_act"
        return f"{name}_inference" if self.calls[0].is_inference else name

    @property
    def arrays(self) -> tuple[Value, ...]:
        return tuple(call.x for call in self.calls)

    @property
    def other_results(self) -> list[Value]:
        return [value for call in self.calls for value in call.results[1:]]

    @property
    def taken(self) -> list[Value]:
        return [*super().taken, *(call.results[0] for call in self.calls)]

    @property
    def operands(self) -> list[Operand]:
        vectors = (v for call in self.calls for v in call.vectors if v is not None)
        return [*(call.x for call in self.calls), *self.tail.residuals, *vectors]

    def call(self, wanted: Collection[Value], *arrays: Any) -> list[jax.Array]:
        waiting = iter(arrays)
        x, *others = [next(waiting) for _ in self.calls]
        residuals = [next(waiting) for _ in self.tail.residuals]
        z = summed(residuals) if residuals else None
        vectors: list[Any] = [
            None if vector is None else next(waiting).reshape(-1)
            for call in self.calls
            for vector in call.vectors
        ]
        options = dict(self.calls[0].options)
        if others:
            del options["out_dtype"]  # None, see `_agree`
        results: Any
        if others:
            # With ReLU, this is `dual_bn_add_relu`, which `operator` names.
            results = dual_bn_act(x, *others, *vectors, activation=self.tail.activation, **options)
        elif self.calls[0].is_inference:
            if not self.tail.has_relu:
                act = self.tail.activation
                scale, bias, mean, var = vectors
                return [bn_act_inference(x, scale, bias, mean, var, act, z=z, **options)]
            if z is None:
                return [bn_relu_inference(x, *vectors, **options)]
            return [bn_add_relu_inference(x, z, *vectors, **options)]
        else:
            scale, bias = vectors
            if not self.tail.has_relu:
                results = bn_act(x, scale, bias, self.tail.activation, z=z, **options)
            elif z is None:
                results = bn_relu(x, scale, bias, **options)
            else:
                results = bn_add_relu(x, z, scale, bias, **options)
        y, *statistics = results
        pairs = zip(statistics, self.other_results, strict=True)
        return [y, *(array.reshape(value.shape) for array, value in pairs if value in wanted)]


def own_candidates(
    graph: Graph, node: Node, taken: Collection[Value]
) -> list[OwnMatch | RefusedMatch]:
    """The matches that begin with this node, the best first, or the reason why there is none."""
    call = own_call(node)
    if call is None or call.results[0] in taken:
        return []
    tail = tail_of(graph, call.results[0], taken)
    if not tail.is_activated and not tail.residuals:
        if not tail.reason:
            return []
        return [RefusedMatch(node, f"it is an operator of jax_bnar already; {tail.reason}")]
    if not may_widen(tail.activation.name) and call.options["out_dtype"] is not None:
        reason = f"there is no operator with {tail.activation.name} and an out_dtype"
        return [RefusedMatch(node, f"it is an operator of jax_bnar already; {reason}")]
    found: list[OwnMatch | RefusedMatch] = [OwnMatch(call.x, call.results[0], tail, (call,))]
    producer = tail.residuals[0].producer if len(tail.residuals) == 1 else None
    if producer is not None:
        other = own_call(producer)
        if other is not None and graph.sole_reader(tail.residuals[0]) and _agree(call, other):
            both = dataclasses.replace(tail, residuals=())
            found.insert(0, OwnMatch(call.x, call.results[0], both, (call, other)))
    return found


def own_call(node: Node) -> OwnCall | None:
    """The call that a node is, if it has no residual and no activation."""
    if node.name == "jax_bnar_named":
        return _synchronised(node)
    if node.name != "custom_jvp_call":
        return None
    equation = sole_equation(node.params)
    if equation is None:
        return None
    params, name = equation.params, equation.primitive.name
    if name not in (_TRAINING, *_INFERENCE) or params["activation"] != "none":
        return None
    waiting = iter(node.inputs)
    given = {
        operand: next(waiting) if is_present else None
        for operand, is_present in zip(_OPERANDS, params["present"], strict=False)
    }
    options = {
        "epsilon": params["epsilon"],
        "implementation": params["implementation"],
        "out_dtype": params.get("out_dtype"),
    }
    if name == _TRAINING:
        options["num_groups"] = params["layout"].num_groups
    elif given["mean"] is None:
        return None  # a BatchNorm that was folded into a convolution
    vectors = tuple(vector for operand, vector in given.items() if operand not in ("x", "z"))
    return _call(node, given["x"], given["z"], vectors, params["layout"], options)


def own_form(equation: Any) -> Literal["training", "inference"] | None:
    """The form of our operators that an equation is, whatever its implementation and activation."""
    if equation.primitive.name == "jax_bnar_named":
        return "training"
    if equation.primitive.name != "custom_jvp_call":
        return None
    return _FORMS.get(jax_compat.function_source(equation.params["call_jaxpr"]))


def sole_equation(params: Mapping[str, Any]) -> Any:
    """The equation of which a custom_jvp_call consists, with the same operands, or None."""
    body = params["call_jaxpr"].jaxpr
    if len(body.eqns) != 1 or body.eqns[0].invars != body.invars:
        return None
    return body.eqns[0]


def _synchronised(node: Node) -> OwnCall | None:
    function = node.params["function"]
    if not isinstance(function, Synchronised):
        return None  # for example with given statistics, as of a BatchRenorm
    config = function.config
    if config.activation != "none" or config.inputs != 1:
        return None
    (x,), z, (affine,) = jax.tree.unflatten(node.params["tree"], node.inputs)
    options = {
        "epsilon": config.epsilon,
        "implementation": config.implementation,
        "out_dtype": config.out_dtype,
        "num_groups": config.layout.num_groups,
        "axis_name": function.names,
        "axis_index_groups": function.groups,
    }
    return _call(node, x, z, tuple(affine), config.layout, options)


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
    if first.is_inference or second.is_inference or first.options["out_dtype"] is not None:
        return False
    return first.options == second.options and first.x.dtype == second.x.dtype
