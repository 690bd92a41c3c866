"""Folded inference equals the unfolded network within the bound of its dtype."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_dtypes, both_implementations
from flax import nnx
from flax_tools import apply, as_flax_needs_it, normal, trained_looking, trained_model
from programs import hlo_calls

from jax_bnar import flax_layers, nnx_layers, torch_weights
from jax_bnar._base.activations import Activation
from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.linen.folded_norm import FoldedBatchNorm
from jax_bnar._operators.folded import bias_act

IMAGES = (4, 36, 36, 3)


def folded_inputs(**fields: Any) -> Any:
    net = flax_layers.ResNet((2, 1), 5, num_filters=4, **fields)
    images = normal(0, IMAGES) - 3
    variables = trained_looking(jax.eval_shape(net.init, jax.random.key(0), images))
    return net, variables, images


SmallNNX = functools.partial(nnx_layers.ResNet, (2, 1), 5, num_filters=4)


@functools.partial(jax.jit, static_argnums=0)
def logits(net: Any, variables: Any, images: Any) -> jax.Array:
    return apply(net, variables, images, train=False)


def largest_error(actual: Any, expected: Any) -> float:
    """The largest error, relative to the largest logit."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


@both_implementations
@all_dtypes
@pytest.mark.parametrize("activation", ["relu", "none"])
@pytest.mark.parametrize("residual", [False, True])
def test_one_pass_adds_exactly(
    implementation: Implementation, dtype: str, residual: bool, activation: Activation
) -> None:
    """The identity statistics scale by exactly one, so only the store rounds.

    Without an activation, the residual is added to what was stored, as networks do.
    """
    x = normal(0, (5, 7, 33), dtype) - jnp.asarray(3, dtype)
    z = normal(1, (5, 7, 33), dtype) - jnp.asarray(3, dtype) if residual else None
    bias = normal(2, (33,)) - 3
    y = bias_act(x, z, bias, activation=activation, implementation=implementation)
    wide = np.float64 if dtype == "float64" else np.float32
    exact = np.asarray(x, wide) + np.asarray(bias, wide)
    if activation == "none":
        exact = np.asarray(jnp.asarray(exact).astype(dtype), wide)
    exact = exact if z is None else exact + np.asarray(z, wide)
    exact = np.maximum(exact, 0) if activation == "relu" else exact
    np.testing.assert_array_equal(y, jnp.asarray(exact).astype(dtype))


def test_a_folded_norm_keeps_the_slope() -> None:
    x, bias = normal(0, (5, 7, 33)) - 3, normal(2, (33,)) - 3
    leaky = functools.partial(nn.leaky_relu, negative_slope=0.3)
    layer = FoldedBatchNorm(activation=leaky)
    y: Any = layer.apply({"params": {"bias": bias}}, x)
    np.testing.assert_allclose(y, leaky(x + bias.reshape(1, 1, 33)), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, 1e-5),
        ({"naming": "algoperf", "stem": "small"}, 1e-5),
        ({"norm": functools.partial(flax_layers.BatchNorm, use_scale=False, use_bias=False)}, 1e-5),
        ({"norm": nn.BatchNorm}, 1e-5),
        ({"norm": functools.partial(flax_layers.BatchNorm, epsilon=0.5)}, 1e-5),
        ({"epsilon": 0.5}, 1e-5),
        (
            {
                "dtype": jnp.bfloat16,
                "norm": functools.partial(flax_layers.BatchNorm, dtype=jnp.float32),
            },
            2**-6,
        ),
        ({"dtype": jnp.bfloat16, "padding": "torch"}, 2**-6),
    ],
    ids=[
        "flax",
        "algoperf",
        "no affine",
        "plain",
        "epsilon of the norm",
        "epsilon of the network",
        "dtype of the norm",
        "bfloat16",
    ],
)
def test_linen_equals_unfolded(fields: dict[str, Any], bound: float) -> None:
    with as_flax_needs_it():
        net, variables, images = folded_inputs(**fields)
        # Both sides approximate the network in float32 with the same weights.
        exact = logits(net.clone(dtype=jnp.float32), variables, images)
        unfolded = logits(net, variables, images)
        folded_net, folded = flax_layers.fold_batch_norms(net, variables)
        y = logits(folded_net, folded, images)
    assert folded.keys() == {"params"}
    assert y.dtype == unfolded.dtype
    assert largest_error(y, exact) <= bound
    # Scaled kernels are rounded like unscaled ones, so folding must not be less accurate.
    assert largest_error(y, exact) <= 1e-6 + 2 * largest_error(unfolded, exact)
    # Initialising the folded network gives the same tree as folding.
    expected = jax.eval_shape(
        functools.partial(folded_net.init, train=False), jax.random.key(0), images
    )
    assert jax.tree.structure(folded) == jax.tree.structure(expected)
    assert jax.tree.map(jnp.shape, folded) == jax.tree.map(jnp.shape, expected)


def test_nnx_equals_unfolded() -> None:
    images = normal(0, IMAGES) - 3
    model = trained_model(SmallNNX)
    model.eval()
    before = nnx.to_pure_dict(nnx.state(model))
    forward = nnx.jit(lambda model, images: model(images))
    exact = forward(model, images)
    folded = nnx_layers.fold_batch_norms(model)
    y = forward(folded, images)
    assert largest_error(y, exact) <= 1e-5
    assert not jax.tree.leaves(nnx.state(folded, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before)

    # With the same weights, Linen's folded network gives the same logits.
    linen = flax_layers.ResNet((2, 1), 5, num_filters=4, padding="torch")
    variables = torch_weights.to_linen(torch_weights.from_nnx(model), linen)
    np.testing.assert_allclose(
        y, logits(*flax_layers.fold_batch_norms(linen, variables), images), rtol=1e-5, atol=1e-5
    )
    folded.train()
    with pytest.raises(ValueError, match="for inference only"):
        folded(images)


def test_nnx_has_the_epsilon_of_the_norm() -> None:
    images = normal(0, IMAGES) - 3
    norm = functools.partial(nnx_layers.BatchNorm, epsilon=0.5)
    model = trained_model(functools.partial(SmallNNX, norm=norm))
    model.eval()
    forward = nnx.jit(lambda model, images: model(images))
    folded = nnx_layers.fold_batch_norms(model)
    assert largest_error(forward(folded, images), forward(model, images)) <= 1e-5


def test_nnx_with_another_activation_and_plain_norms() -> None:
    """A block applies an activation other than ReLU outside the norm; plain norms fold too."""
    images = normal(0, IMAGES) - 3
    with as_flax_needs_it():
        model = trained_model(functools.partial(SmallNNX, norm=nnx.BatchNorm))
        model.layer0.blocks[0].act = nnx.silu
        model.eval()
        folded = nnx_layers.fold_batch_norms(model)
        forward = nnx.jit(lambda model, images: model(images))
        assert largest_error(forward(folded, images), forward(model, images)) <= 1e-5


def test_each_convolution_has_one_pass_after_it() -> None:
    """There are three blocks of three convolutions and the stem; shortcuts need no pass."""
    net, variables, images = folded_inputs()
    folded_net, folded = flax_layers.fold_batch_norms(net, variables, implementation="ffi")

    def calls(net: Any, variables: Any) -> Any:
        return hlo_calls(lambda v, x: apply(net, v, x, train=False), variables, images)

    assert calls(folded_net, folded) == {"jax_bnar_normalise_v1": 10}
    expected = {"jax_bnar_normalise_v1": 8, "jax_bnar_dual_normalise_v1": 2}
    assert calls(net, variables) == expected


def test_errors() -> None:
    net, variables, images = folded_inputs()
    folded_net, folded = flax_layers.fold_batch_norms(net, variables)
    with pytest.raises(ValueError, match="for inference only"):
        apply(folded_net, folded, images, train=True)
    with pytest.raises(TypeError, match=r"must be a jax_bnar\.flax_layers\.ResNet, got Dense"):
        flax_layers.fold_batch_norms(nn.Dense(3), variables)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"norm of the network must be a BatchNorm.*LayerNorm"):
        flax_layers.fold_batch_norms(net.clone(norm=nn.LayerNorm), variables)
    with pytest.raises(TypeError, match=r"norm of the network must be a BatchNorm.*Folded"):
        flax_layers.fold_batch_norms(folded_net, folded)
    with pytest.raises(ValueError, match="there is no batch_stats"):
        flax_layers.fold_batch_norms(net, {"params": variables["params"]})
    with pytest.raises(ValueError, match="there is no batch_stats and no params"):
        flax_layers.fold_batch_norms(net, variables["params"])
    blocks = sum(net.stage_sizes)
    with pytest.raises(ValueError, match=f"; unexpected: BottleneckResNetBlock_{blocks - 1}"):
        flax_layers.fold_batch_norms(net.clone(stage_sizes=net.stage_sizes[:-1]), variables)
    with pytest.raises(ValueError, match=f"; missing: BottleneckResNetBlock_{blocks}"):
        flax_layers.fold_batch_norms(net.clone(stage_sizes=(*net.stage_sizes, 1)), variables)
    linear: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"must be a jax_bnar\.nnx_layers\.ResNet, got Linear"):
        nnx_layers.fold_batch_norms(linear)
    model = trained_model(SmallNNX)
    with pytest.raises(TypeError, match="already folded"):
        nnx_layers.fold_batch_norms(nnx_layers.fold_batch_norms(model))
