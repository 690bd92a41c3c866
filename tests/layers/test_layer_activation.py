"""`activation` of the layers and `act` of the blocks: which are fused, and which run outside."""

import copy
import functools
from collections.abc import Callable
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_tools import (
    apply,
    as_flax_needs_it,
    init,
    normal,
    some_variables,
    trained_looking,
    trained_model,
)
from programs import ours

from jax_bnar import flax_layers, nnx_layers
from jax_bnar._base.activations import Activation, fused_activation
from jax_bnar._layers.linen.folded_norm import FoldedBatchNorm

# Each spelling with the name that it is equivalent to.
SPELLINGS = {
    "jax.nn.relu": (jax.nn.relu, "relu"),
    "nn.relu": (nn.relu, "relu"),
    "nnx.relu": (nnx.relu, "relu"),
    "a copy": (copy.deepcopy(jax.nn.relu), "relu"),
    "None": (None, "none"),
}
spellings = pytest.mark.parametrize(("given", "name"), SPELLINGS.values(), ids=SPELLINGS.keys())

REFUSED = {
    "string": ("celu", ValueError, "must be 'none', 'relu', .*None or a callable, got 'celu'"),
    "number": (1, TypeError, "got 1 of type int"),
    "bool": (True, TypeError, "got True of type bool"),
    "tuple": (("relu",), TypeError, r"got \('relu',\) of type tuple"),
    "class": (nn.PReLU, TypeError, "got the class PReLU; pass an instance"),
}
refused = pytest.mark.parametrize(("given", "error", "words"), REFUSED.values(), ids=REFUSED.keys())
modes = pytest.mark.parametrize("train", [True, False])
residuals = pytest.mark.parametrize("with_residual", [True, False])


frozen_linen = functools.partial(flax_layers.BatchNorm, update_batch_stats=False)


def linen(x: jax.Array, train: bool, residual: Any, **fields: Any) -> Callable[[jax.Array], Any]:
    """A Linen layer with given variables, as a function of x."""
    layer = frozen_linen(use_running_average=not train, **fields)
    variables = some_variables(flax_layers.BatchNorm(), x)
    return lambda x: apply(layer, variables, x, residual=residual)


def of_nnx(x: jax.Array, train: bool, residual: Any, **fields: Any) -> Callable[[jax.Array], Any]:
    """An NNX layer with a given state, as a function of x."""
    make = functools.partial(nnx_layers.BatchNorm, x.shape[-1], update_batch_stats=False, **fields)
    layer = trained_model(make)
    layer.use_running_average = not train
    return lambda x: layer(x, residual=residual)


libraries = pytest.mark.parametrize("library", [linen, of_nnx])


@libraries
@modes
@residuals
@spellings
def test_spellings(library: Any, train: bool, with_residual: bool, given: Any, name: str) -> None:
    """Each spelling gives the same program as the string, and so the same kernel calls."""
    x = normal(0)
    residual = -normal(1) if with_residual else None
    programs = [
        str(jax.make_jaxpr(library(x, train, residual, activation=a))(x)) for a in (given, name)
    ]
    assert programs[0] == programs[1]
    relus = programs[0].count("activation=relu")
    assert (relus > 0) == (name == "relu")


@pytest.mark.parametrize("name", [name for name in get_args(Activation) if hasattr(jax.nn, name)])
def test_copies_of_the_functions(name: str) -> None:
    """A copy of a model (for an average of its weights) has a copy of its activation."""
    function = getattr(jax.nn, name)
    assert fused_activation(copy.deepcopy(function)) == fused_activation(name)


def test_copies_of_other_functions() -> None:
    leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.2)
    assert fused_activation(copy.deepcopy(leaky)) == ("leaky_relu", 0.2)
    alike: Any = jax.custom_jvp(lambda x: jnp.maximum(x, 0))
    alike.defjvps(lambda g, _, x: g * x)
    for other in (jax.nn.softplus, jax.nn.soft_sign, jax.nn.celu, jnp.tanh, alike):
        assert fused_activation(other) is None
        assert fused_activation(copy.deepcopy(other)) is None


def power(y: jax.Array) -> jax.Array:
    """A function for which the order of operations shows: neither odd nor homogeneous."""
    return jnp.square(y) + jnp.tanh(y)


@libraries
@modes
@residuals
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_function_comes_after_norm_and_residual(
    library: Any, train: bool, with_residual: bool, dtype: str
) -> None:
    """Values and gradients are those of applying the function after a layer without activation."""
    x = normal(0)
    residual = -normal(1) if with_residual else None

    def with_gradient(function: Any) -> Any:
        return jax.jit(lambda x: (function(x), jax.grad(lambda x: function(x).sum())(x)))(x)

    fields = {"dtype": dtype}
    taken = library(x, train, residual, activation=power, **fields)
    outside = library(x, train, residual, **fields)
    actual = with_gradient(taken)
    expected = with_gradient(lambda x: power(outside(x)))
    assert actual[0].dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert not np.array_equal(actual[0], outside(x))


@pytest.mark.slow
def test_another_function_with_a_mask_and_other_results() -> None:
    x, layer = normal(0), frozen_linen(use_running_average=False, axis=(1, 3))
    variables = some_variables(flax_layers.BatchNorm(axis=(1, 3)), x)
    mask = x[..., :1] > 2
    function = functools.partial(jnp.argmax, axis=-1)
    y = apply(layer, variables, x, mask=mask)
    np.testing.assert_array_equal(
        apply(layer.clone(activation=function), variables, x, mask=mask), function(y)
    )


def test_a_module_is_part_of_the_layer() -> None:
    """PReLU has a parameter, which is stored under the field's name."""
    x = normal(0) - 3
    layer = frozen_linen(use_running_average=False, activation=nn.PReLU())
    variables = init(layer, x)
    assert variables["params"]["activation"].keys() == {"negative_slope"}
    plain = layer.clone(activation=None)
    without = {"params": {n: variables["params"][n] for n in ("scale", "bias")}}
    without["batch_stats"] = variables["batch_stats"]
    expected = nn.leaky_relu(apply(plain, without, x), 0.01)
    np.testing.assert_array_equal(apply(layer, variables, x), expected)

    model = nnx_layers.BatchNorm(3, activation=nnx.PReLU(), rngs=nnx.Rngs(0))
    assert nnx.to_pure_dict(nnx.state(model, nnx.Param)).keys() == {"activation", "scale", "bias"}
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model, x), expected)


def test_nnx_stores_a_name_where_there_is_one() -> None:
    """Graph definitions then compare equal, and all spellings share one compiled program."""
    x = normal(0)
    layers = [nnx_layers.BatchNorm(3, activation=a, rngs=nnx.Rngs(0)) for a in ("relu", nnx.relu)]
    graphs = [nnx.graphdef(layer) for layer in layers]
    assert graphs[0] == graphs[1]
    layer = layers[0]
    layer.set_attributes(activation=nnx.celu)
    celu = layer(x)
    layer.activation = None
    np.testing.assert_array_equal(celu, nnx.celu(layer(x)))
    assert nnx_layers.BatchNorm(3, activation=None, rngs=nnx.Rngs(0)).activation == "none"


@refused
def test_refused(given: Any, error: type[Exception], words: str) -> None:
    x = normal(0)
    with pytest.raises(error, match=f"BatchNorm: activation .*{words}"):
        linen(x, True, None, activation=given)(x)
    with pytest.raises(error, match=f"BatchNorm: activation .*{words}"):
        nnx_layers.BatchNorm(3, activation=given, rngs=nnx.Rngs(0))
    block: Any = flax_layers.FusedBottleneck(2, act=given)
    with pytest.raises(error, match=f"FusedBottleneck: act .*{words}"):
        init(block, normal(0, (2, 4, 4, 8)))
    with pytest.raises(error, match=f"FusedBottleneck: act .*{words}"):
        nnx_layers.FusedBottleneck(8, 2, act=given, rngs=nnx.Rngs(0))
    model = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    with pytest.raises(error, match=f"BatchNorm: activation .*{words}"):
        nnx_layers.convert_batch_norms(model, activation=given)
    assert type(model.layers[0]) is nnx.BatchNorm


def test_a_function_must_return_an_array() -> None:
    x = normal(0)
    make: Any = functools.partial(nn.PReLU)
    with pytest.raises(TypeError, match=r"activation must return an array, but .* returned PReLU"):
        linen(x, True, None, activation=make)(x)


def test_convert_batch_norms_takes_the_same() -> None:
    x = normal(0)
    outputs = []
    for activation in (nnx.relu, nnx.silu):
        model = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
        nnx_layers.convert_batch_norms(model, activation=activation)
        plain = nnx_layers.BatchNorm(3, rngs=nnx.Rngs(0))
        outputs.append(model(x))
        np.testing.assert_allclose(outputs[-1], activation(plain(x)), rtol=1e-6, atol=1e-6)
    assert not np.array_equal(*outputs)


@pytest.mark.parametrize(
    "act", [nn.relu, "relu", None, "none", nn.silu], ids=["nn.relu", "relu", "None", "none", "silu"]
)
def test_blocks_take_the_same(act: Any) -> None:
    """Equal to the same block with Flax's norms; ReLU in any spelling is fused into the norm."""
    x = normal(0, (3, 6, 6, 4)) - 3
    with as_flax_needs_it():
        outputs, counts = [], []
        for kind in (flax_layers.BatchNorm, nn.BatchNorm):
            norm = functools.partial(kind, use_running_average=True)
            block = flax_layers.FusedBottleneck(2, norm=norm, act=act)
            run = functools.partial(apply, block)
            variables = trained_looking(jax.eval_shape(functools.partial(init, block), x))
            outputs.append(run(variables, x))
            counts.append(str(jax.make_jaxpr(run)(variables, x)).count("name=relu"))
        for kind in (nnx_layers.BatchNorm, nnx.BatchNorm):
            make = functools.partial(nnx_layers.FusedBottleneck, 4, 2, norm=kind, act=act)
            model = trained_model(make)
            model.eval()
            outputs.append(model(x))
    is_relu = act in ("relu", jax.nn.relu)
    assert counts[0] == 0
    assert (counts[1] > 0) == is_relu
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs[2], outputs[3], rtol=1e-5, atol=1e-5)


def test_blocks_choose_the_activation_of_their_norms() -> None:
    """A norm with an activation would also apply it to the shortcut."""
    x = normal(0, (2, 16, 16, 3))
    words = r"norm must leave the activation to the block, got a partial with activation='relu'"
    norm: Any = functools.partial(flax_layers.BatchNorm, activation="relu")
    for net in (
        flax_layers.FusedBottleneck(2, norm=functools.partial(norm, momentum=0.9)),
        flax_layers.ResNet((1,), 2, norm=norm),
    ):
        with pytest.raises(ValueError, match=words):
            init(net, x)
    norm = functools.partial(nnx_layers.BatchNorm, activation="relu")
    with pytest.raises(ValueError, match=words):
        nnx_layers.ResNet((1,), 2, norm=norm, rngs=nnx.Rngs(0))


class Scaled(nnx.BatchNorm):
    """A third-party norm whose attribute `activation` has nothing to do with ours."""

    activation = "swish"


def test_another_norm_may_have_an_activation_of_its_own() -> None:
    x = normal(0, (2, 16, 16, 3))
    outputs = []
    with as_flax_needs_it():
        for kind in (Scaled, nnx.BatchNorm):
            model = trained_model(functools.partial(nnx_layers.ResNet, (1,), 2, norm=kind))
            model.eval()
            outputs += [model(x), nnx_layers.fold_batch_norms(model)(x)]
    np.testing.assert_array_equal(*outputs[::2])
    np.testing.assert_array_equal(*outputs[1::2])


@pytest.mark.slow
def test_folding_loses_no_activation() -> None:
    """In a converted network, a norm may have another activation than its block."""
    make = functools.partial(nnx_layers.ResNet, (1,), 2, num_filters=4, norm=nnx.BatchNorm)
    x = normal(0, (2, 16, 16, 3))
    model = trained_model(make)
    model.layer0.blocks[0].act = "relu"
    model.eval()
    with as_flax_needs_it():
        expected = model(x)
    folded = nnx_layers.fold_batch_norms(model)
    np.testing.assert_allclose(folded(x), expected, rtol=1e-5, atol=1e-5)
    nnx_layers.convert_batch_norms(model, activation=nnx.relu)
    with pytest.raises(
        ValueError, match="a norm may include the activation of its block but no other"
    ):
        nnx_layers.fold_batch_norms(model)


@pytest.mark.parametrize("given", [nn.relu, None, nn.silu], ids=["relu", "None", "silu"])
def test_folded_norms_take_the_same(given: Any) -> None:
    x = normal(0) - 3
    layer = FoldedBatchNorm(activation=given)
    variables = init(layer, x)
    expected = x if given is None else given(x)
    np.testing.assert_allclose(apply(layer, variables, x), expected, rtol=1e-6)


def test_relu_of_the_layer_is_one_call() -> None:
    x = normal(0)
    assert ours(linen(x, True, -x, activation=nn.relu), x) == {"forward": 1}


@libraries
def test_a_residual_without_an_activation_is_added_by_the_kernel(library: Any) -> None:
    """The linear bottleneck of MobileNetV2: one call each way, and the residual gets dy itself."""
    x, residual = normal(0), -normal(1)

    def layer(x: jax.Array, residual: jax.Array) -> jax.Array:
        return library(x, True, residual)(x)

    def gradients(x: jax.Array, residual: jax.Array) -> Any:
        y, pullback = jax.vjp(layer, x, residual)
        return pullback(jnp.cos(y))

    assert ours(gradients, x, residual) == {"forward": 1, "backward": 1}
    y = layer(x, residual)
    np.testing.assert_allclose(y, library(x, True, None)(x) + residual, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(gradients)(x, residual)[1], jnp.cos(y))
