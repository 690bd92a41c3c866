"""Which ReLUs become part of the operator, and which the program keeps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fuse_operands import BIAS, SCALE, X, Z, batch_norm
from fuse_tools import assert_fused, assert_no_worse
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_bnar


def _after(a: Any, activation: Callable[[Any], Any]) -> Any:
    return activation(a)


# Here the BatchNorm is fused but the ReLU is not, so the program keeps that. The addition may be
# taken in nevertheless.
KEPT_TAILS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "z of one channel vector": (lambda bn, z: jax.nn.relu(bn + z[:1, :1]), "broadcast"),
    "z of one example": (lambda bn, z: jax.nn.relu(bn + z[:1]), "broadcast"),
    "z of one number a pixel": (lambda bn, z: jax.nn.relu(bn + z[..., :1]), "broadcast"),
    "z of another dtype": (
        lambda bn, z: jax.nn.relu(bn.astype(jnp.float64) + z.astype(jnp.float64)),
        "convert_element_type follows",
    ),
    "normalised array returned": (lambda bn, z: (jax.nn.relu(bn + z), bn), "returned"),
    "normalised array read": (lambda bn, z: jax.nn.relu(bn + z) + jnp.sin(bn), "more than once"),
    "pre-activation returned": (lambda bn, z: (jax.nn.relu(bn + z), bn + z), "more than once"),
    "gate": (lambda bn, z: jax.nn.relu(bn * jax.nn.sigmoid(z) + z), "mul follows"),
    "named": (lambda bn, z: jax.nn.relu(checkpoint_name(bn, "bn") + z), "checkpoint_name"),
    "barrier": (
        lambda bn, z: jax.nn.relu(lax.optimization_barrier(bn) + z),
        "optimization_barrier follows",
    ),
    "maximum": (lambda bn, z: jnp.maximum(bn + z, 0), "jax.nn.relu"),
    "maximum of zeros": (lambda bn, z: jnp.maximum(jnp.zeros_like(bn), bn + z), "jax.nn.relu"),
    "clip": (lambda bn, z: jnp.clip(bn + z, 0), "jax.nn.relu"),
    "clip to 6": (lambda bn, z: jnp.clip(bn + z, 0, 6), "jax.nn.relu6"),
    "clip to 5": (lambda bn, z: jnp.clip(bn + z, 0, 5), "max follows"),
    "where greater": (
        lambda bn, z: _after(bn + z, lambda a: jnp.where(a > 0, a, 0)),
        "by the sign",
    ),
    "where less": (lambda bn, z: _after(bn + z, lambda a: jnp.where(a < 0, 0, a)), "by the sign"),
    "product": (lambda bn, z: _after(bn + z, lambda a: a * (a > 0)), "by the sign"),
    "steep leaky": (lambda bn, z: jax.nn.leaky_relu(bn + z, 1.5), "leaky_relu follows"),
    "gelu": (lambda bn, z: _after(bn + z, lambda a: a * jax.lax.erf(a)), "like gelu follows"),
}


WITHOUT_ADDITION = (
    "z of one channel vector",
    "z of one example",
    "z of one number a pixel",
    "z of another dtype",
    "normalised array returned",
    "normalised array read",
    "pre-activation returned",
    "gate",
    "named",
    "barrier",
)

# What an activation is called in the report.
ACTIVATIONS = {
    **{
        name: name
        for name in """
        celu hard_sigmoid hard_tanh log_sigmoid selu soft_sign softplus sparse_plus squareplus
        """.split()  # noqa: SIM905 (a list would take a line for each)
    },
    "sigmoid": "logistic",
    "tanh": "tanh",
}


@pytest.mark.parametrize("is_in_a_block", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_named(name: str, is_in_a_block: bool) -> None:
    """Also inside a jitted block, and after an addition."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return getattr(jax.nn, name)(batch_norm(x, scale, bias) + z)

    if is_in_a_block:
        layer = jax.jit(layer)
    (candidate,) = jax_bnar.explain(layer)(X, Z, SCALE, BIAS).matched
    assert candidate.operator == "bn_act"  # with the addition, and without an activation
    assert candidate.reason == f"{ACTIVATIONS[name]} follows, which is not fused"


def test_activations_by_hand_are_named() -> None:
    def reason(activation: Callable[[Any], Any]) -> str:
        def layer(x: Any, scale: Any, bias: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return activation(batch_norm(x, scale, bias))

        (candidate,) = jax_bnar.explain(layer)(X, SCALE, BIAS).matched
        return candidate.reason

    like_gelu = "an activation like gelu follows, which is not fused"
    assert reason(lambda a: a * jnp.tanh(a)) == like_gelu
    assert reason(lambda a: a * jax.lax.erfc(-a)) == like_gelu
    assert reason(lambda a: jax.nn.elu(a, alpha=0.5)) == "a form of elu follows that is not fused"
    assert (
        reason(surrogate) == "surrogate has a custom derivative, which is not that of jax.nn.relu"
    )
    assert reason(guided) == "guided has a custom derivative, which is not that of jax.nn.relu"
    assert reason(lambda a: a + jnp.sin(a)) == "the normalised array is used more than once"


@pytest.mark.parametrize("name", KEPT_TAILS)
def test_kept_tails(name: str) -> None:
    tail, reason = KEPT_TAILS[name]

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return tail(batch_norm(x, scale, bias), z)

    operator = "batch_norm" if name in WITHOUT_ADDITION else "bn_act"
    assert_fused(layer, X, Z, SCALE, BIAS, **{operator: 1})
    (candidate,) = jax_bnar.explain(layer)(X, Z, SCALE, BIAS).matched
    assert reason in candidate.reason


@pytest.mark.parametrize(
    "name", [n for n in KEPT_TAILS if n not in ("named", "z of another dtype")]
)
def test_kept_tails_at_exact_zeros(name: str) -> None:
    """With a scale, a bias and a residual of 0, each spelling keeps its own derivative at 0."""
    tail, _ = KEPT_TAILS[name]
    zeros = jnp.zeros(3, jnp.float32)

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return tail(batch_norm(x, scale, bias), z)

    assert_no_worse(layer, X, jnp.maximum(Z, 0), zeros, zeros)


@jax.custom_jvp
def surrogate(a: jax.Array) -> jax.Array:
    """ReLU with a derivative that is 1 for all inputs above -1."""
    return jnp.maximum(a, 0)


@surrogate.defjvp
def _surrogate_jvp(primals: Any, tangents: Any) -> Any:
    return surrogate(primals[0]), jnp.where(primals[0] > -1, tangents[0], 0)


@jax.custom_jvp
def half_at_zero(a: jax.Array) -> jax.Array:
    """ReLU except for the derivative at 0."""
    return jnp.maximum(a, 0)


@half_at_zero.defjvp
def _half_at_zero_jvp(primals: Any, tangents: Any) -> Any:
    return half_at_zero(primals[0]), jnp.where(primals[0] >= 0, tangents[0], 0)


@jax.custom_vjp
def guided(a: jax.Array) -> jax.Array:
    """Guided backpropagation: negative gradients are dropped."""
    return jnp.maximum(a, 0)


guided.defvjp(
    lambda a: (guided(a), a), lambda a, g: (jnp.where((a > 0) & (g > 0), g, jnp.zeros_like(g)),)
)


@jax.custom_jvp
def own_relu(a: jax.Array) -> jax.Array:
    """ReLU with a copy of the rule of `jax.nn.relu`."""
    return jnp.maximum(a, 0)


@own_relu.defjvp
def _own_relu_jvp(primals: Any, tangents: Any) -> Any:
    (a,), (a_dot,) = primals, tangents
    return own_relu(a), lax.select(a > 0, a_dot, lax.full_like(a_dot, 0))


@pytest.mark.parametrize("relu", [surrogate, half_at_zero, guided], ids=lambda f: f.__name__)
def test_rules_of_others(relu: Any) -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return relu(batch_norm(x, scale, bias) + z)

    assert_fused(layer, X, Z, SCALE, BIAS, bn_act=1)


def test_the_same_rule_written_again() -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return own_relu(batch_norm(x, scale, bias) + z)

    assert_fused(layer, X, Z, SCALE, BIAS, bn_add_relu=1)
