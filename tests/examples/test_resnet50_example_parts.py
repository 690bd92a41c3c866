"""Unit tests of examples/resnet50: optimizer, metrics, initial weights, evaluation and step."""

import dataclasses
import json
import math
import pathlib
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resnet50_example as example
from programs import ours

# isort: split
from flax import linen as nn
from resnet50 import (
    accuracy,
    config,
    metrics,
    model,
    optimizer,
    steps,
    train_state,
    train_step,
    weights,
)
from resnet50 import devices as train_devices
from resnet50.display import Display
from resnet50.errors import UserError
from safetensors import numpy as safetensors
from tensorboardX.proto import event_pb2

from jax_bnar import torch_weights

RECIPE = config.Training(
    batch_size=512, learning_rate=0.1, warmup_epochs=1.0, epochs=3.0, weight_decay=0.5
)


def test_without_kernels_the_norm_is_not_called_fused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert model.describe_norm("fused") == "fused BatchNorm"
    assert model.describe_norm("flax") == "flax BatchNorm"
    monkeypatch.setenv("JAX_BNAR_IMPLEMENTATION", "xla")
    assert model.describe_norm("fused") == "fused BatchNorm in pure JAX, without kernels"
    assert model.describe_norm("flax") == "flax BatchNorm"


def test_schedule() -> None:
    rate = optimizer.schedule(RECIPE, steps_per_epoch=10, total_steps=30)
    expected = [0.2 * step / 10 for step in range(10)]
    expected += [0.1 * (1 + math.cos(math.pi * step / 20)) for step in range(21)]
    np.testing.assert_allclose([float(np.asarray(rate(s))) for s in range(31)], expected, atol=1e-7)
    without = optimizer.schedule(config.Training(warmup_epochs=0.0), 10, 30)
    assert float(np.asarray(without(0))) == pytest.approx(0.256)


def test_the_last_epoch_is_evaluated_once() -> None:
    """The digits have 22.45 steps in an epoch: 20 epochs end with step 450, not with 440 or 449."""
    epoch = 1437 / 64
    twenty = sorted(steps.evaluation_steps(epoch, steps.whole_steps(20 * epoch)))
    assert len(twenty) == 20
    assert twenty[:3] == [23, 45, 68]
    assert twenty[-2:] == [427, 450]
    assert steps.evaluation_steps(epoch, steps.whole_steps(epoch)) == {23}
    assert steps.evaluation_steps(100 * epoch, 12) == {12}
    assert steps.evaluation_steps(math.inf, 12) == {12}


def test_fractions_of_an_epoch_are_not_rounded_up_for_a_rounding_error() -> None:
    assert 0.1 * 3 * 10 > 3
    assert steps.whole_steps(0.1 * 3 * 10) == 3
    assert steps.evaluation_steps(0.1 * 3 * 10, 9) == {3, 6, 9}
    assert steps.evaluation_steps(0.01, 3) == {1, 2, 3}


def test_a_warmup_is_shorter_than_the_training() -> None:
    short = dataclasses.replace(RECIPE, epochs=1.0)
    assert (optimizer.warmup_epochs(RECIPE), optimizer.warmup_epochs(short)) == (1.0, 0.5)
    rate = optimizer.schedule(short, steps_per_epoch=10, total_steps=10)
    assert float(np.asarray(rate(5))) == pytest.approx(0.2)
    assert float(np.asarray(rate(10))) == pytest.approx(0, abs=1e-8)
    once = optimizer.schedule(short, steps_per_epoch=0.5, total_steps=1)
    assert float(np.asarray(once(0))) == pytest.approx(0.2)


def test_nesterov_step_decays_kernels_only() -> None:
    """Two steps equal the formula; biases and BatchNorm's scale and bias have no decay."""
    sgd = optimizer.make(RECIPE, optax.constant_schedule(0.1))
    params = example.variables()["params"]
    gradient = jax.tree.map(lambda p: jnp.full_like(p, 0.25), params)
    optimizer_state, now = sgd.init(params), params
    for _ in range(2):
        updates, optimizer_state = sgd.update(gradient, optimizer_state, now)
        now = optax.apply_updates(now, updates)

    def expected(decay: float) -> float:
        value, velocity = 1.0, 0.0
        for _ in range(2):
            g = 0.25 + decay * value
            velocity = RECIPE.momentum * velocity + g
            value -= 0.1 * (g + RECIPE.momentum * velocity)
        return value

    for path, leaf in jax.tree_util.tree_leaves_with_path(now):
        decay = 0.5 if path[-1].key == "kernel" else 0.0
        np.testing.assert_allclose(leaf, expected(decay), rtol=1e-6, err_msg=str(path))


def test_evaluation_counts_as_a_sort_would() -> None:
    """Ties rank in the order of the classes, NaN is never correct, and weight 0 does not count."""
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 6, (200, 12)).astype(np.float32)  # many ties
    labels = generator.integers(0, 12, 200).astype(np.int32)
    scores[3, labels[3]] = np.nan
    scores[4] = np.nan
    weight = (generator.random(200) < 0.7).astype(np.float32)
    weight[3:6] = 1, 1, 0
    scores[5] = np.inf  # its loss is NaN, but does not count
    order = np.argsort(-scores, axis=1, kind="stable")
    rank = (order == labels[:, None]).argmax(axis=1)
    rank[3:5] = 99
    counted = weight > 0

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    with example.as_users_run_jax():
        sums = accuracy.compiled(lambda _, images: images, mesh)
        batches = [
            {"image": scores[part], "label": labels[part], "weight": weight[part]}
            for part in (slice(0, 100), slice(100, 200))
        ]
        seen: list[Any] = []
        result = accuracy.evaluate(sums, {"a": {}, "b": {}}, batches, mesh, seen.append)
    assert result is not None
    assert result["a"].images == counted.sum()
    assert result["a"].top1 == (counted & (rank < 1)).sum() / counted.sum()
    assert result["a"].top5 == (counted & (rank < 5)).sum() / counted.sum()
    assert math.isnan(result["a"].loss)
    assert len(seen) == 2
    assert result["b"].top5 == result["a"].top5

    batches[0] = {name: values[10:] for name, values in batches[0].items()}
    with example.as_users_run_jax():
        shorter = accuracy.evaluate(sums, {"a": {}}, batches, mesh, seen.append)
        stopped = accuracy.evaluate(sums, {"a": {}}, batches, mesh, seen.append, lambda: True)
    assert stopped is None
    assert shorter is not None
    loss = shorter["a"].loss
    rows, own = scores[10:].astype(np.float64), labels[10:]
    losses = np.log(np.exp(rows).sum(1)) - rows[np.arange(190), own]
    assert loss == pytest.approx(losses[counted[10:]].mean(), rel=1e-5)


def events(folder: pathlib.Path) -> list[Any]:
    """The events in TensorBoard's files, oldest file first.

    The files are sequences of length, checksum, record, checksum.
    """
    proto: Any = event_pb2
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(proto.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_metrics_stand_once_after_a_resumption(tmp_path: pathlib.Path) -> None:
    console = example.silent_console()
    killed = metrics.Recorder(tmp_path, 0, Display(console))
    for step in (10, 20, 30):
        killed.write(step, "train", {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "ki')  # killed while writing
    resumed = metrics.Recorder(tmp_path, 20, Display(console))
    resumed.write(30, "train", {"loss": 33.0, "top1": 0.5})
    killed.close()
    resumed.close()
    assert metrics.read(tmp_path / "metrics.jsonl") == [
        {"step": 10, "kind": "train", "loss": 10.0},
        {"step": 20, "kind": "train", "loss": 20.0},
        {"step": 30, "kind": "train", "loss": 33.0, "top1": 0.5},
    ]
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events(tmp_path)
        for value in event.summary.value
    ]
    assert scalars[-2:] == [(30, "train/loss", 33.0), (30, "train/top1", 0.5)]
    starts = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert starts == [0, 21]  # TensorBoard drops earlier events from these steps on; 20 stays
    with (tmp_path / metrics.FILE).open("a") as file:
        file.write('{"step": 21, "kind": "tr\n{"step": 22, "kind": "train"}\n')
    assert metrics.read(tmp_path / metrics.FILE)[-1] == {"step": 22, "kind": "train"}
    assert metrics.was_evaluated(tmp_path / metrics.FILE, 20) is False
    assert (
        metrics.Recorder(tmp_path, 0, Display(console)).close() is None
    )  # a new run in an old folder
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_metrics_survive_a_full_disk(tmp_path: pathlib.Path) -> None:
    console = example.silent_console()
    recorder = metrics.Recorder(tmp_path, 0, Display(console))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    recorder.write(1, "train", {"loss": 1.0})
    recorder.write(2, "train", {"loss": 1.0})
    assert example.printed(console).count("metrics cannot be written (OSError: [Errno 28]") == 1
    (tmp_path / "metrics.jsonl").unlink()
    recorder.write(3, "train", {"loss": 3.0})
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 3


NET = model.build(config.Model(stage_sizes=(1,), num_filters=2, padding="torch"), classes=3)


def test_first_weights(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(weights.READERS, ".test", lambda *_: example.variables(fill=5.0))
    path = tmp_path / "weights.test"
    path.touch()
    loaded, with_head = weights.begin_with(example.variables(), path, NET)
    assert with_head
    assert all((leaf == 5).all() for leaf in jax.tree.leaves(loaded))
    loaded, with_head = weights.begin_with(example.variables(classes=4), path, NET)
    assert not with_head
    assert loaded["params"]["Dense_0"]["kernel"].shape == (2, 4)
    assert (loaded["params"]["Dense_0"]["kernel"] == 1).all()
    assert (loaded["params"]["conv_init"]["kernel"] == 5).all()
    with pytest.raises(UserError, match=r"another network: batch_stats/bn_init/mean is \(2,\) th"):
        weights.begin_with(example.variables(filters=4), path, NET)
    with pytest.raises(UserError, match="there is no such file"):
        weights.begin_with(example.variables(), tmp_path / "missing.test", NET)
    with pytest.raises(UserError, match="weights can come from"):
        weights.begin_with(example.variables(), tmp_path / "weights.unknown", NET)
    (tmp_path / "v1.5").mkdir()
    with pytest.raises(UserError, match=r"v1.5 is not an output folder of train.py"):
        weights.begin_with(example.variables(), tmp_path / "v1.5", NET)


def of_shape(net: Any) -> Any:
    """Random variables of the network."""
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    shapes = jax.eval_shape(net.init, jax.random.key(0), image)
    numbers = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: numbers.random(leaf.shape, np.float32), shapes)


def test_first_weights_of_torchvision(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "resnet.safetensors"
    with example.as_users_run_jax():
        given = of_shape(NET)
        stored = torch_weights.from_linen(NET, given)
        safetensors.save_file({f"module.{name}": value for name, value in stored.items()}, path)
        loaded, with_head = weights.begin_with(jax.tree.map(np.zeros_like, given), path, NET)
        assert with_head
        jax.tree.map(np.testing.assert_array_equal, loaded, given)

        other = NET.clone(num_classes=5)
        begun = jax.tree.map(np.zeros_like, of_shape(other))
        loaded, with_head = weights.begin_with(begun, path, other)
        assert not with_head
        assert loaded["params"]["Dense_0"]["kernel"].shape == (8, 5)
        np.testing.assert_array_equal(
            loaded["batch_stats"]["bn_init"]["var"], given["batch_stats"]["bn_init"]["var"]
        )
        for net, sentence in (
            (NET.clone(padding="SAME"), r"on every side; give --padding torch\.$"),
            (NET.clone(stage_sizes=(2,)), r"do not fit the network; missing: layer1\.1\.conv1"),
        ):
            with pytest.raises(UserError, match=f"^--init-from .*resnet.safetensors: .*{sentence}"):
                weights.begin_with(given, path, net)
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(
            UserError, match=r"resnet.safetensors is not a safetensors file: .*[^.]\.$"
        ):
            weights.begin_with(given, path, NET)


class Linear(nn.Module):
    """A network without BatchNorm, whose gradient is easy to compute by hand."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        seen = self.variable("batch_stats", "batches", jnp.zeros, (), jnp.float32)
        if train and not self.is_initializing():
            seen.value += 1
        kernel = self.param("kernel", nn.initializers.normal(), (4, 3), jnp.float32)
        return x.reshape(x.shape[0], -1) @ kernel


@pytest.mark.parametrize(
    ("accumulate", "devices", "remat"), [(1, 1, False), (4, 1, False), (2, 2, True)]
)
def test_training_step(accumulate: int, devices: int, remat: bool) -> None:
    """Compares smoothed labels, mean gradient, moving average and sums with NumPy."""
    options = dataclasses.replace(
        RECIPE,
        accumulate=accumulate,
        remat=remat,
        ema_decay=0.5,
        label_smoothing=0.3,
        weight_decay=0.0,
    )
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (8, 2, 2, 1), np.uint8)
    labels = generator.integers(0, 3, 8).astype(np.int32)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    with example.as_users_run_jax():
        sgd = optimizer.make(options, optax.constant_schedule(0.1))
        step = train_step.compiled(Linear(), sgd, options, (0.4,), (0.2,), mesh)
        state = train_state.initial(Linear(), (2, 2, 1), sgd, True, jax.random.key(0))
        kernel = np.asarray(state.params["kernel"], np.float64)
        batch = {"image": images, "label": labels}
        for _ in range(2):
            state = step(state, train_devices.put_batch(batch, mesh))

    x = ((images / 255 - 0.4) / 0.2).reshape(8, 4)
    targets = np.eye(3)[labels] * 0.7 + 0.1
    velocity, average, losses, correct = np.zeros_like(kernel), kernel, [], 0
    for index in range(2):
        scores = x @ kernel
        probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        losses.append(-(targets * np.log(probabilities)).sum(1).mean())
        correct += (scores.argmax(1) == labels).sum()
        gradient = x.T @ (probabilities - targets) / 8
        velocity = options.momentum * velocity + gradient
        kernel = kernel - 0.1 * (gradient + options.momentum * velocity)
        decay = min(0.5, (1 + index) / (10 + index))
        average = decay * average + (1 - decay) * kernel
    np.testing.assert_allclose(state.params["kernel"], kernel, rtol=1e-5)
    np.testing.assert_allclose(state.ema["params"]["kernel"], average, rtol=1e-5)
    np.testing.assert_allclose(state.window.loss, sum(losses), rtol=1e-5)
    counters = (state.window.correct, state.window.images, state.window.steps, state.step)
    assert tuple(map(int, counters)) == (correct, 16, 2, 2)
    # Each micro-batch updates BatchNorm's running statistics once.
    assert float(state.batch_stats["batches"]) == 2 * accumulate


def test_remat_computes_normalised_arrays_again() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    batch = {"image": np.zeros((4, 8, 8, 3), np.uint8), "label": np.zeros(4, np.int32)}
    again = []
    for remat in (False, True):
        options = dataclasses.replace(RECIPE, remat=remat)
        sgd = optimizer.make(options, optax.constant_schedule(0.1))
        with example.as_users_run_jax():
            state = jax.eval_shape(
                lambda sgd=sgd: train_state.initial(NET, (8, 8, 3), sgd, False, jax.random.key(0))
            )
            step = train_step.compiled(NET, sgd, options, (0.4,) * 3, (0.2,) * 3, mesh)
            counted = ours(step, state, batch)
        again.append((counted.get("normalise", 0), counted.get("dual_normalise", 0)))
    # The stem and two inner norms, and the end of the block.
    assert again == [(0, 0), (3, 1)]
