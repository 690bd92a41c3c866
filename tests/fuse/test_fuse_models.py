"""What `fuse` finds in ResNets of other libraries, and that they compute the same with it.

Counts are of whole ResNet-50s, which are only traced; results are of two small blocks.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import plain_models
import pytest
from flax import nnx
from fuse_tools import array, kernels, operators
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from plain_resnet import PlainResNet

import jax_bnar
from jax_bnar._fuse import affine, plan

IMAGES = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
SMALL = array((4, 8, 8, 3))
TRAINING = {"bn_relu": 33, "bn_add_relu": 12, "dual_bn_add_relu": 4}
EVALUATION = {"bn_relu_inference": 33, "bn_add_relu_inference": 16}
SMALL_TRAINING = {"bn_relu": 5, "bn_add_relu": 1, "dual_bn_add_relu": 1}


def _linen(dtype: Any = jnp.float32, **kwargs: Any) -> tuple[Any, Any]:
    network = PlainResNet((3, 4, 6, 3), 10, dtype=dtype, **kwargs)
    with jax.numpy_dtype_promotion("standard"):
        return network, jax.eval_shape(network.init, jax.random.key(0), IMAGES)


def _apply(network: Any, variables: Any, x: Any, train: bool) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return network.apply(variables, x, train, mutable=["batch_stats"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linen(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation in bfloat16 is only taken where it pays."""
    network, variables = _linen(jnp.dtype(dtype))
    apply = functools.partial(_apply, network)
    images = jax.ShapeDtypeStruct(IMAGES.shape, jnp.dtype(dtype))
    assert operators(apply, variables, images, True) == TRAINING
    monkeypatch.setattr(affine, "pays", lambda dtype: True)
    assert operators(apply, variables, images, False) == EVALUATION


@pytest.mark.parametrize("use_fast_variance", [True, False])
def test_linen_with_axis_name(use_fast_variance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Flax's ImageNet example has it: statistics over the devices of a mapped axis."""
    norm = functools.partial(nn.BatchNorm, axis_name="batch", use_fast_variance=use_fast_variance)
    network, variables = _linen()
    monkeypatch.setattr("plain_resnet.NORM", norm)

    def mapped(variables: Any, x: Any) -> Any:
        apply = jax.vmap(
            functools.partial(_apply, network), in_axes=(None, 0, None), axis_name="batch"
        )
        return apply(variables, x, True)

    images = jax.ShapeDtypeStruct((2, *IMAGES.shape), jnp.float32)
    assert operators(mapped, variables, images) == TRAINING

    def sharded(variables: Any, x: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
        shard = functools.partial(_apply, network, train=True)
        return jax.shard_map(
            shard, mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P("batch"), P())
        )(variables, x)

    assert operators(sharded, variables, IMAGES) == TRAINING


def test_linen_modules_and_lines() -> None:
    network, variables = _linen()
    report = jax_bnar.explain(functools.partial(_apply, network))(variables, IMAGES, True)
    first, second = report.candidates[:2]
    assert first.module == "PlainResNet/bn_init"
    assert second.module == "PlainResNet/BottleneckResNetBlock_0/BatchNorm_0"
    assert all("plain_resnet.py:" in candidate.line for candidate in report.candidates)
    assert not report.refused


def test_nnx() -> None:
    model = nnx.eval_shape(plain_models.nnx_model)
    model.train()
    assert operators(lambda model, x: model(x), model, IMAGES) == TRAINING
    model.eval()
    assert operators(lambda model, x: model(x), model, IMAGES) == EVALUATION


def test_by_hand() -> None:
    init, apply = plain_models.by_hand()
    parameters = jax.eval_shape(init, jax.random.key(0))
    assert operators(apply, parameters, IMAGES, True) == TRAINING
    assert operators(apply, parameters, IMAGES, False) == EVALUATION


def test_stax() -> None:
    """It has no evaluation mode."""
    init, apply = plain_models.stax_model()
    shape = jax.eval_shape(lambda key: init(key, IMAGES.shape)[1], jax.random.key(0))
    shape = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shape)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert operators(apply, shape, IMAGES) == TRAINING


def test_equinox() -> None:
    """Each image on its own under `vmap`; of the mode "ema" only evaluation is a BatchNorm."""
    equinox = pytest.importorskip("equinox")

    def batch(model: Any, state: Any, x: Any) -> Any:
        axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        return jax.vmap(model, **axes)(x, state)

    images = jax.ShapeDtypeStruct((2, 3, 64, 64), jnp.float32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for mode, training in (("batch", TRAINING), ("ema", {})):
            model, state = equinox.filter_eval_shape(plain_models.equinox_model, mode)
            assert operators(batch, model, state, images) == training
            tested = equinox.nn.inference_mode(model)
            assert operators(batch, tested, state, images) == EVALUATION


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_haiku(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affine, "pays", lambda dtype: True)
    haiku = pytest.importorskip("haiku")
    images = jax.ShapeDtypeStruct(IMAGES.shape, jnp.dtype(dtype))

    def forward(x: Any, train: bool) -> Any:
        return haiku.nets.ResNet50(10)(x, is_training=train)

    network = haiku.transform_with_state(forward)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        init = functools.partial(network.init, train=True)
        parameters, state = jax.eval_shape(lambda key, x: init(key, x), jax.random.key(0), IMAGES)
        parameters = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), parameters
        )

        def apply(parameters: Any, state: Any, x: Any, train: bool) -> Any:
            return network.apply(parameters, state, None, x, train)

        assert operators(apply, parameters, state, images, True) == TRAINING
        assert operators(apply, parameters, state, images, False) == EVALUATION


def test_keras() -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # read when it is imported
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was imported with another backend")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        model = keras.applications.ResNet50(weights=None, input_shape=IMAGES.shape[1:], classes=10)
        trained = [variable.value for variable in model.trainable_variables]
        others = [variable.value for variable in model.non_trainable_variables]
        for training, counts in ((True, TRAINING), (False, EVALUATION)):
            call = functools.partial(model.stateless_call, training=training)
            assert operators(call, trained, others, IMAGES) == counts


def test_keras_fits_the_same() -> None:
    """At the method that its trainer differentiates."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was imported with another backend")
    layers = keras.layers
    images, labels = np.asarray(SMALL), np.arange(len(SMALL)) % 3
    counts: list[dict[str, int]] = []

    def fit(is_fused: bool) -> list[float]:
        keras.utils.set_random_seed(0)
        given = keras.Input(SMALL.shape[1:])
        stem = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(given))
        stem = layers.ReLU()(stem)
        branch = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(stem))
        joined = layers.Activation("relu")(layers.Add()([stem, branch]))
        model = keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling2D()(joined)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss=loss)
        if is_fused:
            whole = model.compute_loss_and_updates

            def compute(*args: Any, **kwargs: Any) -> Any:
                counts.append(operators(functools.partial(whole, **kwargs), *args))
                return jax_bnar.fuse(whole)(*args, **kwargs)

            model.compute_loss_and_updates = compute
        return model.fit(images, labels, epochs=3, verbose=0, shuffle=False).history["loss"]

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(fit(True), fit(False), rtol=1e-5)
    assert counts
    assert all(count == {"bn_relu": 1, "bn_add_relu": 1} for count in counts)


def _agree(given: Any, expected: Any, tolerance: float = 2e-4) -> None:
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        scale = 1 + np.max(np.abs(b), initial=0.0)
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)


def _step(apply: Callable[..., Any]) -> Callable[..., Any]:
    def loss(parameters: Any, x: Any) -> Any:
        y, state = apply(parameters, x)
        return jnp.mean(jnp.square(y)), state

    return jax.value_and_grad(loss, has_aux=True)


def test_linen_trains_the_same() -> None:
    network = PlainResNet((2,), 10, num_filters=4)
    variables = network.init(jax.random.key(0), SMALL)

    def apply(variables: Any, x: Any) -> Any:
        return _apply(network, variables, x, True)

    assert operators(apply, variables, SMALL) == SMALL_TRAINING
    expected = jax.jit(_step(apply))(variables, SMALL)
    _agree(jax.jit(_step(jax_bnar.fuse(apply)))(variables, SMALL), expected)


def test_by_hand_trains_the_same() -> None:
    init, whole = plain_models.by_hand((2,), 4)
    parameters = init(jax.random.key(0))

    def apply(parameters: Any, x: Any) -> Any:
        return whole(parameters, x, True)

    assert operators(apply, parameters, SMALL) == SMALL_TRAINING
    expected = jax.jit(_step(apply))(parameters, SMALL)
    _agree(jax.jit(_step(jax_bnar.fuse(apply)))(parameters, SMALL), expected)


def _nnx_statistics(model: Any) -> Any:
    return jax.tree.leaves(nnx.state(model, nnx.BatchStat))


def test_nnx_state_is_written_back() -> None:
    def forward(model: Any, x: Any) -> Any:
        return model(x)

    model, copy = (plain_models.nnx_model((2,), 4) for _ in range(2))
    expected = forward(model, SMALL)
    given = jax_bnar.fuse(forward)(copy, SMALL)
    assert kernels(jax_bnar.fuse(forward), copy, SMALL) >= 1
    _agree(given, expected)
    assert np.abs(_nnx_statistics(copy)[0]).max() > 0
    _agree(_nnx_statistics(copy), _nnx_statistics(model))


@pytest.mark.parametrize("is_jitted", [True, False])
def test_nnx_trains_the_same(is_jitted: bool) -> None:
    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(model(x)))

    def step(loss: Any) -> Any:
        step = nnx.value_and_grad(loss)
        return nnx.jit(step) if is_jitted else step

    model, copy = (plain_models.nnx_model((1,), 4) for _ in range(2))
    expected = step(loss)(model, SMALL)
    _agree(step(jax_bnar.fuse(loss))(copy, SMALL), expected)
    _agree(_nnx_statistics(copy), _nnx_statistics(model))


@pytest.mark.parametrize("is_jitted", [True, False])
def test_nnx_state_as_argument(is_jitted: bool) -> None:
    """The functional interface: inside of `grad` nobody may write to variables of outside."""
    definition, parameters, state = nnx.split(plain_models.nnx_model((1,), 4), nnx.Param, ...)

    def loss(parameters: Any, state: Any, x: Any) -> Any:
        model = nnx.merge(definition, parameters, state, copy=True)
        return jnp.mean(jnp.square(model(x))), nnx.split(model, nnx.Param, ...)[2]

    def step(loss: Any) -> Any:
        step = jax.value_and_grad(loss, has_aux=True)
        return jax.jit(step) if is_jitted else step

    expected = step(loss)(parameters, state, SMALL)
    fused = jax_bnar.fuse(loss)
    assert kernels(fused, parameters, state, SMALL) >= 1
    _agree(step(fused)(parameters, state, SMALL), expected)


def test_nnx_in_a_closure_is_refused() -> None:
    model = plain_models.nnx_model((1,), 4)
    with pytest.raises(ValueError, match=r"fuse\(lambda model, x: model\(x\)\)\(model, x\)"):
        jax_bnar.fuse(lambda x: model(x))(SMALL)
    with pytest.raises(ValueError, match="not among its arguments"):
        jax_bnar.fuse(model)(SMALL)
    before = _nnx_statistics(model)
    model.eval()
    expected = model(SMALL)
    _agree(jax_bnar.fuse(lambda x: model(x))(SMALL), expected)
    _agree(_nnx_statistics(model), before, 0)


def test_nnx_variables_that_appear_are_refused() -> None:
    class Counting(nnx.Module):
        def __call__(self, x: Any) -> Any:
            self.seen = nnx.Variable(x.sum())
            return x

    with pytest.raises(ValueError, match="variables that it did not have"):
        jax_bnar.fuse(lambda module, x: module(x))(Counting(), SMALL)


def test_equinox_trains_the_same() -> None:
    equinox = pytest.importorskip("equinox")
    model, state = plain_models.equinox_model("batch", (1,), 4)
    x = array((4, 3, 8, 8))

    def batch(model: Any, x: Any) -> Any:
        axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        return jax.vmap(model, **axes)(x, state)

    def step(batch: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            y, state = batch(model, x)
            return jnp.mean(jnp.square(y)), state

        return equinox.filter_jit(equinox.filter_value_and_grad(loss, has_aux=True))

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert operators(batch, model, x) == {"bn_relu": 3, "dual_bn_add_relu": 1}
        expected = step(batch)(model, x)
        given = step(jax_bnar.fuse(batch))(model, x)
    _agree(*(equinox.filter(t, equinox.is_array) for t in (given, expected)))


def test_a_resnet_is_rewritten_in_half_a_second() -> None:
    """Processor time, the best of three; without the trace of the network itself."""
    network, variables = _linen()
    closed = jax.make_jaxpr(functools.partial(_apply, network, train=True))(variables, IMAGES)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        rewritten = plan.Planner().plan(closed.jaxpr, {})
        seconds.append(time.process_time() - start)
        assert len(rewritten.matches) == 49
    assert min(seconds) < 0.5
