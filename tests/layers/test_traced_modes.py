"""Layers whose mode is an array, as in jax.jit(model.apply)(variables, x, train)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_tools import SHAPE, normal

from jax_bnar import equinox_layers, flax_layers, haiku_layers, nnx_layers

pytestmark = pytest.mark.quick

CHANNELS = SHAPE[-1]


def linen(x: jax.Array) -> Callable[[Any], Any]:
    layer = flax_layers.BatchNorm()
    variables = layer.init(jax.random.key(0), x, use_running_average=True)
    return lambda mode: layer.apply(
        variables, x, use_running_average=mode, mutable=["batch_stats"]
    )[0]


def of_nnx(x: jax.Array) -> Callable[[Any], Any]:
    layer = nnx_layers.BatchNorm(CHANNELS, rngs=nnx.Rngs(0))
    return lambda mode: nnx.clone(layer)(x, use_running_average=mode)


def haiku(x: jax.Array) -> Callable[[Any], Any]:
    net = hk.transform_with_state(
        lambda x, mode: haiku_layers.BatchNorm(True, True, 0.9)(x, is_training=mode)
    )
    variables = net.init(jax.random.key(0), x, True)
    return lambda mode: net.apply(*variables, None, x, mode)[0]


def equinox(x: jax.Array) -> Callable[[Any], Any]:
    layer, state = eqx.nn.make_with_state(equinox_layers.BatchNorm)(
        CHANNELS, "batch", mode="batch", dtype=x.dtype
    )
    return lambda mode: jax.vmap(lambda x: layer(x.T, state, inference=mode)[0], axis_name="batch")(
        x
    )


# What makes a call that takes a mode, and the name of the mode.
LAYERS = {
    "Linen": (linen, "use_running_average"),
    "NNX": (of_nnx, "use_running_average"),
    "Haiku": (haiku, "is_training"),
    "Equinox": (equinox, "inference"),
}


@pytest.mark.parametrize(("make", "name"), LAYERS.values(), ids=LAYERS.keys())
def test_a_mode_without_a_value_is_refused(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a static bool.* mark it as static"):
        jax.jit(make(normal(0)))(True)


@pytest.mark.parametrize("make", [make for make, _ in LAYERS.values()], ids=LAYERS.keys())
def test_a_mode_with_a_value_is_taken(make: Callable[..., Any]) -> None:
    """An array, and one that is computed from what eager jax.grad differentiates."""
    for mode in (True, False):
        sign = jnp.float32(1 if mode else -1)
        expected = make(normal(0))(mode)
        assert (make(normal(0))(jnp.asarray(mode)) == expected).all()
        value, _ = jax.value_and_grad(lambda s: (s * make(normal(0))(s > 0)).sum())(sign)
        assert value == pytest.approx(float(sign * expected.sum()))
