"""`fuse` finds the joins in ResNets of other libraries, and the networks still compute the same.

Operators are counted in whole ResNet-50s, which are only traced. Results are compared on two small
blocks.
"""

import functools
import os
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_tools import array, operators
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_bnar
from benchmarks.models import by_hand, linen, stax
from benchmarks.models import nnx as nnx_models
from jax_bnar._fuse import affine, plan

IMAGES = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
SMALL = array((4, 8, 8, 3))
TRAINING = {"bn_relu": 33, "bn_add_relu": 12, "dual_bn_add_relu": 4}
EVALUATION = {"bn_relu_inference": 33, "bn_add_relu_inference": 16}


def _linen(dtype: Any = jnp.float32, **kwargs: Any) -> tuple[Any, Any]:
    network = linen.PlainResNet((3, 4, 6, 3), 10, dtype=dtype, **kwargs)
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


@pytest.mark.slow
@pytest.mark.parametrize("use_fast_variance", [True, False])
def test_linen_with_axis_name(use_fast_variance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Flax's ImageNet example, statistics are taken over the devices of a mapped axis."""
    norm = functools.partial(nn.BatchNorm, axis_name="batch", use_fast_variance=use_fast_variance)
    network, variables = _linen()
    monkeypatch.setattr("benchmarks.models.linen.NORM", norm)

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
    assert all("models/linen.py:" in candidate.line for candidate in report.candidates)
    assert not report.refused


def test_nnx() -> None:
    model = nnx.eval_shape(nnx_models.model)
    model.train()
    assert operators(lambda model, x: model(x), model, IMAGES) == TRAINING
    model.eval()
    assert operators(lambda model, x: model(x), model, IMAGES) == EVALUATION


def test_by_hand() -> None:
    init, apply = by_hand.functions()
    parameters = jax.eval_shape(init, jax.random.key(0))
    assert operators(apply, parameters, IMAGES, True) == TRAINING
    assert operators(apply, parameters, IMAGES, False) == EVALUATION


def test_stax() -> None:
    """stax has no evaluation mode."""
    init, apply = stax.model()
    shape = jax.eval_shape(lambda key: init(key, IMAGES.shape)[1], jax.random.key(0))
    shape = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shape)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert operators(apply, shape, IMAGES) == TRAINING


@pytest.mark.slow
def test_equinox() -> None:
    """Each image is separate under `vmap`.

    In the mode "ema", training normalises with the running statistics, and computes those of the
    batch for them alone.
    """
    equinox = pytest.importorskip("equinox")
    from benchmarks.models.equinox import model as equinox_model

    def batch(model: Any, state: Any, x: Any) -> Any:
        axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        return jax.vmap(model, **axes)(x, state)

    images = jax.ShapeDtypeStruct((2, 3, 64, 64), jnp.float32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for mode, training in (("batch", TRAINING), ("ema", {"batch_statistics": 53})):
            model, state = equinox.filter_eval_shape(equinox_model, mode)
            assert operators(batch, model, state, images) == training
            tested = equinox.nn.inference_mode(model)
            assert operators(batch, tested, state, images) == EVALUATION


@pytest.mark.slow
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


@pytest.mark.slow
def test_keras() -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported
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


def test_a_resnet_is_rewritten_in_half_a_second() -> None:
    """The time is the best of three processor times, without tracing the network itself."""
    network, variables = _linen()
    closed = jax.make_jaxpr(functools.partial(_apply, network, train=True))(variables, IMAGES)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        rewritten = plan.Planner().plan(closed.jaxpr, {})
        seconds.append(time.process_time() - start)
        assert len(rewritten.matches) == 49
    assert min(seconds) < 0.5
