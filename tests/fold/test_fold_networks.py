"""`fold_batch_norms` of whole networks, of every library."""

import functools
import gc
import weakref
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_tools import as_flax_needs_it, trained_looking
from fold_tools import folded, runs_each_time

import jax_bnar
from jax_bnar import flax_layers, nnx_layers

IMAGES = jax.random.normal(jax.random.key(0), (2, 32, 32, 3), jnp.float32)


def trained(tree: Any) -> Any:
    """The tree with vectors that are positive and not all alike, as statistics may be."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    return structure.unflatten(
        [
            jax.random.uniform(key, leaf.shape, leaf.dtype, 0.5, 2.0)
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size == max(leaf.shape, default=0)
            else leaf
            for key, leaf in zip(keys, leaves, strict=True)
        ]
    )


def norm(train: bool, **options: Any) -> Any:
    return nn.BatchNorm(use_running_average=not train, **options)


class SqueezeExcite(nn.Module):
    """The block of EfficientNet: expansion, depthwise convolution, gate, projection, residual."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        y = nn.silu(norm(train)(nn.Conv(16, (1, 1), use_bias=False)(x)))
        y = nn.silu(norm(train)(nn.Conv(16, (3, 3), feature_group_count=16)(y)))
        gate = nn.sigmoid(
            nn.Conv(16, (1, 1))(nn.relu(nn.Conv(4, (1, 1))(y.mean((1, 2), keepdims=True))))
        )
        return (
            norm(train)(
                nn.Conv(x.shape[-1], (1, 1), use_bias=False)(y * jnp.broadcast_to(gate, y.shape))
            )
            + x
        )


class UNet(nn.Module):
    """Down, up by a transposed convolution, and the two joined."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        first = nn.relu(norm(train)(nn.Conv(4, (3, 3))(x)))
        down = nn.relu(norm(train)(nn.Conv(8, (3, 3), strides=2)(first)))
        up = nn.relu(norm(train)(nn.ConvTranspose(4, (2, 2), strides=(2, 2))(down)))
        joined = jnp.concatenate([first, up], -1)
        return nn.Conv(2, (1, 1))(nn.relu(norm(train)(nn.Conv(4, (3, 3))(joined))))


@pytest.mark.parametrize(
    ("net", "count"),
    [(SqueezeExcite(), 3), pytest.param(UNet(), 4, marks=pytest.mark.slow)],
)
def test_linen(net: nn.Module, count: int) -> None:
    variables = trained(net.init(jax.random.key(1), IMAGES))
    network = folded(net.apply, variables, IMAGES)
    assert len(network.report.folded) == count, network.report
    assert not network.report.refused
    assert "rsqrt" not in runs_each_time(network, IMAGES)
    module = jax_bnar.fold_batch_norms(net, variables, IMAGES)
    assert [array.shape for array in module.variables] == [a.shape for a in network.variables]
    assert {layer.module for layer in module.report.folded} >= {f"{type(net).__name__}/BatchNorm_0"}


def test_a_layer_is_named_although_its_result_is_reshaped() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = norm(False)(nn.Conv(4, (3, 3))(x))
            return nn.Dense(3)(y.reshape(x.shape[0], -1))

    variables = trained(Net().init(jax.random.key(1), IMAGES))
    network = folded(Net().apply, variables, IMAGES)
    (layer,) = network.report.layers
    assert (layer.module, layer.shape) == ("Net/BatchNorm_0", (2, 32, 32, 4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_resnet(dtype: str) -> None:
    net = flax_layers.ResNet((1, 1), 5, num_filters=4, dtype=jnp.dtype(dtype))
    variables = trained_looking(jax.eval_shape(net.init, jax.random.key(0), IMAGES))
    with as_flax_needs_it():
        network = jax_bnar.fold_batch_norms(net, variables, IMAGES, train=False)
        logits = network.apply(network.variables, IMAGES)
    assert len(network.report.folded) == 9
    assert not network.report.refused
    kernels = [array for array in network.variables if array.ndim == 4]
    assert {str(kernel.dtype) for kernel in kernels} == {dtype}
    wide = flax_layers.ResNet((1, 1), 5, num_filters=4)
    expected: Any = wide.apply(variables, IMAGES, train=False)
    bound = 1e-5 if dtype == "float32" else 0.05
    error = jnp.max(jnp.abs(logits.astype(jnp.float32) - expected))
    assert float(error) <= bound * float(jnp.max(jnp.abs(expected)))


@pytest.mark.parametrize(
    "act", [jax.nn.silu, functools.partial(jax.nn.leaky_relu, negative_slope=0.3)]
)
def test_our_layer_with_another_activation(act: Any) -> None:
    """The activation is a part of the operator, and of what is left of it."""
    scale, bias, mean = (jnp.linspace(start, 2, 5, dtype=jnp.float32) for start in (0.5, -1, 0))
    kernel = jax.random.normal(jax.random.key(3), (3, 5), jnp.float32)
    variables = {"kernel": kernel, "vectors": (scale, bias, mean, scale)}

    def net(variables: Any, x: jax.Array) -> jax.Array:
        product = x @ variables["kernel"]
        scale, bias, mean, var = variables["vectors"]
        return jax_bnar.bn_act_inference(product, scale, bias, mean, var, act)

    x = jax.random.normal(jax.random.key(4), (7, 3), jnp.float32)
    network = jax_bnar.fold_batch_norms(net, variables, x)
    assert len(network.report.folded) == 1, network.report
    np.testing.assert_allclose(
        network.apply(network.variables, x), net(variables, x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_haiku_resnet() -> None:
    def forward(x: jax.Array, is_training: bool) -> Any:
        return hk.nets.ResNet18(5)(x, is_training)

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    variables = trained(net.init(jax.random.key(0), IMAGES, True))
    network = folded(lambda v, x: net.apply(*v, x, False)[0], variables, IMAGES)
    assert len(network.report.folded) == 20
    assert not network.report.refused
    assert sum(array.ndim == 4 for array in network.variables) == 20


class _Equinox(eqx.Module):
    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear
    last: eqx.nn.BatchNorm

    def __init__(self, mode: Any) -> None:
        self.first = eqx.nn.Conv2d(3, 8, 3, dtype=jnp.float32, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(8, "batch", mode=mode, dtype=jnp.float32)
        self.second = eqx.nn.Linear(8, 4, dtype=jnp.float32, key=jax.random.key(1))
        self.last = eqx.nn.BatchNorm(4, "batch", mode=mode, dtype=jnp.float32)

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        x, state = self.norm(self.first(x), state)
        x, state = self.last(self.second(jax.nn.relu(x).mean((1, 2))), state)
        return jax.nn.relu(x), state


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_equinox(mode: str) -> None:
    model, state = eqx.nn.make_with_state(_Equinox)(mode)
    images = jnp.moveaxis(IMAGES, -1, 1)

    with as_flax_needs_it():
        _, state = jax.vmap(model, (0, None), axis_name="batch", out_axes=(0, None))(images, state)
    model = eqx.nn.inference_mode(model)

    def net(variables: Any, images: jax.Array) -> Any:
        model, state = variables
        return jax.vmap(lambda x: model(x, state)[0], axis_name="batch")(images)

    with as_flax_needs_it():
        network = jax_bnar.fold_batch_norms(net, (model, state), images)
        expected = net((model, state), images)
        result = jax.jit(network.apply)(network.variables, images)
    assert len(network.report.folded) == 2, network.report
    assert not network.report.refused
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_nnx() -> None:
    model = nnx_layers.ResNet((1, 1), 5, num_filters=4, rngs=nnx.Rngs(0))
    model(IMAGES * 3 + 1)  # moves the running statistics
    model.eval()
    expected = model(IMAGES)
    state = jax.tree.map(np.asarray, nnx.state(model))
    networks = [
        jax_bnar.fold_batch_norms(model, IMAGES),
        jax_bnar.fold_batch_norms(lambda models, x: models["net"](x), {"net": model}, IMAGES),
    ]
    for network in networks:
        assert len(network.report.folded) == 9
        result = jax.jit(network.apply)(network.variables, IMAGES)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)


def test_the_old_weights_are_let_go() -> None:
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    network = jax_bnar.fold_batch_norms(
        lambda w, x: w["net"](x) * 2, {"net": model}, IMAGES[0, 0, :, :1].repeat(4, 1)
    )
    old = weakref.ref(model)
    del model
    gc.collect()
    assert old() is None
    assert network.apply(network.variables, jnp.ones((1, 4), jnp.float32)).shape == (1, 6)
