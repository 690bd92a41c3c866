"""`fuse` takes the activations of `jax.nn` into the operator, as five libraries write them."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_operands import BIAS, SCALE, X, Z, batch_norm
from fuse_tools import assert_fused, assert_no_worse, operators
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_tools import make_mesh
from tiers import slow_except

import jax_bnar
from jax_bnar._fuse import curves

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "leaky_relu of a slope": functools.partial(jax.nn.leaky_relu, negative_slope=0.2),
    "silu": jax.nn.silu,
    "swish": jax.nn.swish,
    "silu by hand": lambda a: a * jax.nn.sigmoid(a),
    "hard_silu": jax.nn.hard_silu,
    "hard_swish": jax.nn.hard_swish,
    "in a jit of its own": jax.jit(jax.nn.silu),
    "elu": jax.nn.elu,
    "elu by hand": lambda a: jnp.where(a > 0, a, jnp.expm1(jnp.where(a > 0, 0, a))),
    "gelu": jax.nn.gelu,
    "gelu in a jit of its own": jax.jit(jax.nn.gelu),
    "gelu from the left": lambda a: (
        0.5 * a * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
    ),
    "hard_silu from the left": lambda a: a * jax.nn.relu6(a + 3) / 6,
    "a slope of -0.0": functools.partial(jax.nn.leaky_relu, negative_slope=-0.0),
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "exact gelu by erfc": lambda a: 0.5 * a * jax.lax.erfc(-a * math.sqrt(0.5)),
    "exact gelu by erf": lambda a: 0.5 * a * (1 + jax.lax.erf(a / math.sqrt(2))),
    "exact gelu from the right": lambda a: (jax.lax.erf(a / math.sqrt(2)) + 1) * (a * 0.5),
    "mish": jax.nn.mish,
    "mish by hand": lambda a: jnp.tanh(jax.nn.softplus(a)) * a,
}
every_activation = pytest.mark.parametrize("name", ACTIVATIONS)


@every_activation
@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_spelling(dtype: str, has_z: bool, name: str) -> None:
    act = ACTIVATIONS[name]

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            y = batch_norm(wide, scale, bias).astype(x.dtype)
            return act(y + z if has_z else y)

    x, z = (a.astype(dtype) for a in (X, Z))
    assert_fused(layer, x, z, SCALE, BIAS, bn_act=1)
    (candidate,) = jax_bnar.explain(layer)(x, z, SCALE, BIAS).matched
    assert candidate.reason == ""
    assert candidate.bytes_saved == (4 if has_z else 2) * x.nbytes


def clipped(a: jax.Array) -> jax.Array:
    """ReLU6 but for the derivative, which is 1/2 at 0 and at 6."""
    return jnp.minimum(jnp.maximum(a, 0), 6)


def steeper(a: jax.Array) -> jax.Array:
    """A leaky ReLU whose sign of y is not all that its derivative needs."""
    return jax.nn.leaky_relu(a, negative_slope=1.25)


def other_shift(a: jax.Array) -> jax.Array:
    return a * jax.nn.relu6(a + 2.0) / 6.0


def other_gate(a: jax.Array) -> jax.Array:
    return a * jax.nn.sigmoid(a * 1.702)


def other_alpha(a: jax.Array) -> jax.Array:
    return jax.nn.elu(a, alpha=0.5)


def without_a_safe_exponent(a: jax.Array) -> jax.Array:
    """An ELU but for the derivative, which is NaN where e^a overflows."""
    return jnp.where(a > 0, a, jnp.expm1(a))


def other_softplus(a: jax.Array) -> jax.Array:
    """Mish, but with log(e + e^a)."""
    return a * jnp.tanh(jnp.logaddexp(a, jnp.ones_like(a)))


def other_scale(a: jax.Array) -> jax.Array:
    """An exact GELU but for the scale in the error function."""
    return 0.5 * a * (1 + jax.lax.erf(a / 1.4))


def other_cube(a: jax.Array) -> jax.Array:
    """GELU with another constant."""
    return 0.5 * a * (1 + jnp.tanh(0.7978845608 * (a + 0.0447 * a**3)))


def other_power(a: jax.Array) -> jax.Array:
    return a * (0.5 * (1.0 + jnp.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**5))))


def above_zero(a: jax.Array) -> jax.Array:
    """A leaky ReLU but for the derivative at 0."""
    return jnp.where(a > 0, a, 0.01 * a)


def other_branch(a: jax.Array) -> jax.Array:
    return jnp.where(a >= 0, 0.01 * a, a)


@pytest.mark.parametrize(
    "act",
    [
        clipped,
        steeper,
        other_shift,
        other_gate,
        other_alpha,
        without_a_safe_exponent,
        other_softplus,
        other_scale,
        other_cube,
        other_power,
        above_zero,
        other_branch,
        jax.nn.celu,
    ],
)
def test_others_stay_as_they_are(act: Any) -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return act(batch_norm(x, scale, bias))

    assert_fused(layer, X, SCALE, BIAS, batch_norm=1)
    (candidate,) = jax_bnar.explain(layer)(X, SCALE, BIAS).matched
    assert candidate.reason


WITH_BRANCHES = ("relu6", "leaky_relu", "a slope of -0.0", "elu", "elu by hand", "hard_silu")


@pytest.mark.parametrize("name", slow_except(WITH_BRANCHES, ACTIVATIONS))
def test_at_exact_zeros(name: str) -> None:
    """With a scale, a bias and a residual of 0, the derivative at 0 decides."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return ACTIVATIONS[name](batch_norm(x, scale, bias) + z)

    zeros = jnp.zeros_like(BIAS)
    assert_fused(layer, X, jnp.zeros_like(Z), zeros, zeros, bn_act=1)


def test_what_is_read_elsewhere_is_not_taken_in() -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias)
        return jax.nn.silu(y) + jnp.sin(y)

    def returned(x: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias)
        return jax.nn.silu(y), y

    def gate(x: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias)
        sigmoid = jax.nn.sigmoid(y)
        return y * sigmoid, sigmoid

    for function in (layer, returned, gate):
        assert operators(function, X, SCALE, BIAS) == {"batch_norm": 1}
        assert_no_worse(function, X, SCALE, BIAS)


# What is matched is the same as for one norm.
@pytest.mark.parametrize("name", slow_except(("relu6", "silu by hand", "exact gelu"), ACTIVATIONS))
def test_the_join_of_two_norms_is_one_operator(name: str) -> None:
    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return ACTIVATIONS[name](batch_norm(x, scale, bias) + batch_norm(z, bias, scale))

    assert_fused(layer, X, Z, SCALE, BIAS, dual_bn_act=1)


@pytest.mark.parametrize("name", ["elu", "mish", "hard_silu"])
def test_what_is_set_around_the_first_program_does_not_matter(name: str) -> None:
    """The functions of `jax.nn` are traced once, for all programs of a process."""
    curves._pattern.cache_clear()
    mesh = make_mesh("explicit", data=8)

    def layer(x: Any, scale: Any, bias: Any) -> Any:
        return ACTIVATIONS[name](batch_norm(x, scale, bias))

    vector = jnp.ones(8, X.dtype)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((8, 3, 3, 8), X.dtype), NamedSharding(mesh, P("data")))
        assert operators(layer, x, vector, vector) == {"bn_act": 1}
    for dtype in (X.dtype, jnp.float64):
        assert operators(layer, *(a.astype(dtype) for a in (X, SCALE, BIAS))) == {"bn_act": 1}


def test_deep_networks() -> None:
    """An activation is found however many follow, and however many read its result."""

    def network(x: Any, scale: Any, bias: Any) -> Any:
        y = x
        for _ in range(8):
            y = jax.nn.gelu(batch_norm(y, scale, bias) + y)
        return sum(y * jnp.full_like(y, i) for i in range(40))

    assert operators(network, X, SCALE, BIAS) == {"bn_act": 8}


def test_a_size_that_is_not_known_is_no_number() -> None:
    def layer(x: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias)
        return y * (jax.nn.relu6(y + 3) / x.shape[0])

    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, *X.shape[1:]), X.dtype)
    (candidate,) = jax_bnar.explain(layer)(x, SCALE, BIAS).matched
    assert candidate.operator == "batch_norm"


@every_activation
def test_in_a_long_chain(name: str) -> None:
    """Other operations of the same kinds that follow are not taken for it."""

    def layer(x: Any, scale: Any, bias: Any) -> Any:
        y = ACTIVATIONS[name](batch_norm(x, scale, bias))
        for _ in range(12):
            y = y * jnp.tanh(y * jax.nn.sigmoid(y) + 1.0) + jnp.where(y >= 0, y, 0.5 * y)
        return y

    assert operators(layer, X, SCALE, BIAS) == {"bn_act": 1}


def test_own_batch_norm() -> None:
    """A call of `batch_norm` of jax_bnar with the activation outside."""

    def layer(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.silu(jax_bnar.batch_norm(x, scale, bias).y + z)

    def evaluation(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        mean, var = jnp.zeros_like(bias), jnp.ones_like(bias)
        return jax.nn.relu6(jax_bnar.batch_norm_inference(x, scale, bias, mean, var) + z)

    assert operators(layer, X, Z, SCALE, BIAS) == {"bn_act": 1}
    assert_no_worse(layer, X, Z, SCALE, BIAS)
    assert operators(evaluation, X, Z, SCALE, BIAS) == {"bn_act_inference": 1}
    assert_no_worse(evaluation, X, Z, SCALE, BIAS)


class InvertedResidual(nn.Module):
    """The block of MobileNetV2 (ReLU6), MobileNetV3 (hard swish) and EfficientNet (SiLU)."""

    act: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def norm(a: Any) -> Any:
            return nn.BatchNorm(use_running_average=False)(a)

        y = self.act(norm(nn.Conv(12, (1, 1), use_bias=False)(x)))
        y = self.act(norm(nn.Conv(12, (3, 3), feature_group_count=12, use_bias=False)(y)))
        return x + norm(nn.Conv(x.shape[-1], (1, 1), use_bias=False)(y))


class NnxBottleneck(nnx.Module):
    """The block of YOLOv8 (SiLU) and Darknet (leaky ReLU)."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        rngs = nnx.Rngs(0)
        self.act = act
        self.convs = nnx.List([nnx.Conv(3, 3, (3, 3), use_bias=False, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.BatchNorm(3, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = self.act(norm(conv(y)))
        return x + y


@pytest.mark.parametrize("act", [nn.relu6, nn.hard_swish, nn.silu])
def test_linen_blocks(act: Any) -> None:
    block = InvertedResidual(act)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        variables = block.init(jax.random.key(0), X)

        def loss(params: Any, x: Any) -> Any:
            y, updated = block.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return (y * jnp.cos(y)).sum(), updated

        assert operators(loss, variables["params"], X) == {"bn_act": 3}
        assert_same_gradients(loss, variables["params"], X)


@pytest.mark.parametrize("act", [nnx.silu, nnx.leaky_relu])
def test_nnx_blocks(act: Any) -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        definition, state = nnx.split(NnxBottleneck(act))

        def loss(state: Any, x: Any) -> Any:
            block = nnx.merge(definition, state)
            y = block(x)
            return (y * jnp.cos(y)).sum(), nnx.state(block, nnx.BatchStat)

        assert operators(loss, state, X) == {"bn_act": 2}
        assert_same_gradients(loss, state, X)


@jax.custom_jvp
def surrogate(u: Any) -> Any:
    return jax.nn.relu6(u)


surrogate.defjvps(lambda tangent, y, u: tangent)


@pytest.mark.slow
def test_mapped_activations() -> None:
    """Those of `jax.nn` have the same rule where they are mapped, and others have another one."""

    def layer(act: Any, x: Any, scale: Any, bias: Any) -> Any:
        return jax.vmap(jax.vmap(act))(batch_norm(x, scale, bias))

    for name, act in ACTIVATIONS.items():
        assert operators(functools.partial(layer, act), X, SCALE, BIAS) == {"bn_act": 1}, name
    assert_fused(functools.partial(layer, jax.nn.hard_silu), X, SCALE, BIAS, bn_act=1)
    assert_fused(functools.partial(layer, surrogate), X, SCALE, BIAS, batch_norm=1)
    x, vector = jnp.cos(jnp.arange(64.0).astype(X.dtype)).reshape(8, 8), jnp.ones(8, X.dtype)
    for act, axis in itertools.product((jax.nn.relu6, jax.nn.mish, jax.nn.hard_silu), (0, 1)):

        def mapped(x: Any, scale: Any, bias: Any, act: Any = act, axis: int = axis) -> Any:
            y = (x - x.mean(0)[None]) / jnp.sqrt(x.var(0) + 1e-5)[None] * scale[None] + bias[None]
            return jax.vmap(act, in_axes=axis, out_axes=axis)(y)

        assert_no_worse(mapped, x, vector, vector)


@pytest.mark.slow
def test_haiku_and_equinox() -> None:
    def of_haiku(x: Any) -> Any:
        return jax.nn.silu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))

    transformed = hk.transform_with_state(of_haiku)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        params, state = transformed.init(None, X)
        function = functools.partial(transformed.apply, params, state, None)
        assert operators(function, X) == {"bn_act": 1}
        np.testing.assert_allclose(
            jax_bnar.fuse(function)(X)[0], function(X)[0], rtol=1e-4, atol=1e-5
        )
        norm, norm_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
            3, "batch", mode="batch", dtype=jnp.float32
        )
        leaves, structure = jax.tree.flatten(norm_state)  # A state may be used only once.

        def of_equinox(act: Any, x: Any) -> Any:
            def example(x: Any) -> Any:
                y, _ = norm(x, jax.tree.unflatten(structure, leaves))
                return act(y)

            return jax.vmap(example, axis_name="batch")(x)

        images = jnp.moveaxis(X, -1, 1)
        for act in ACTIVATIONS.values():
            layer = functools.partial(of_equinox, act)
            assert operators(layer, images) == {"bn_act": 1}
            np.testing.assert_allclose(
                jax_bnar.fuse(layer)(images), layer(images), rtol=1e-4, atol=1e-5
            )


def assert_same_gradients(loss: Callable[..., Any], params: Any, x: Any) -> None:
    plain, fused = (
        jax.jit(jax.value_and_grad(f, has_aux=True, allow_int=True))(params, x)
        for f in (loss, jax_bnar.fuse(loss))
    )
    for own, other in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        if jnp.issubdtype(other.dtype, jnp.inexact):
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-4)
