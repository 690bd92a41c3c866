"""One optimizer step: forward, backward over micro-batches, update, moving average."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh

from jax_bnar.checkpoint_policies import dots_and_statistics_saveable
from resnet50 import devices
from resnet50.config import Training
from resnet50.inference import normalise
from resnet50.train_state import TrainState, Window

Step = Callable[[TrainState, Any], TrainState]


def compiled(
    net: nn.Module,
    optimizer: optax.GradientTransformation,
    options: Training,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    mesh: Mesh,
) -> Step:
    """The step under jit. The devices share the batch, and XLA adds the sums over them.

    BatchNorm's statistics are those of the micro-batch on all devices, because under jit a sharded
    array is one array.
    """

    def gradient(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, updated = net.apply(
                {"params": params, "batch_stats": batch_stats},
                normalise(images, mean, std),
                mutable=["batch_stats"],
            )
            logits = logits.astype(jnp.float32)
            targets = optax.smooth_labels(
                jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32),
                options.label_smoothing,
            )
            loss = optax.softmax_cross_entropy(logits, targets).mean()
            correct = (logits.argmax(-1) == labels).sum(dtype=jnp.int32)
            return loss, (updated["batch_stats"], correct)

        if options.remat:
            loss_of = jax.checkpoint(loss_of, policy=dots_and_statistics_saveable)
        (loss, (batch_stats, correct)), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        return batch_stats, (gradient, loss, correct)

    def over_micro_batches(state: TrainState, batch: Any) -> Any:
        images, labels = batch["image"], batch["label"]
        if options.accumulate == 1:
            return gradient(state.params, state.batch_stats, images, labels)

        def one(carry: Any, micro_batch: Any) -> tuple[Any, None]:
            batch_stats, sums = carry
            batch_stats, new = gradient(state.params, batch_stats, *micro_batch)
            return (batch_stats, jax.tree.map(jnp.add, sums, new)), None

        zeros = (jax.tree.map(jnp.zeros_like, state.params), jnp.float32(0), jnp.int32(0))
        micro_batches = tuple(_divided(a, options.accumulate, mesh) for a in (images, labels))
        (batch_stats, (total, loss, correct)), _ = jax.lax.scan(
            one, (state.batch_stats, zeros), micro_batches
        )
        average = jax.tree.map(lambda g: g / options.accumulate, total)
        return batch_stats, (average, loss / options.accumulate, correct)

    def step(state: TrainState, batch: Any) -> TrainState:
        batch_stats, (gradient, loss, correct) = over_micro_batches(state, batch)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if options.ema_decay:
            new = {"params": params, "batch_stats": batch_stats}
            ema = optax.incremental_update(new, ema, 1 - _decay(options.ema_decay, state.step))
        window = Window(
            state.window.loss + loss,
            state.window.correct + correct,
            state.window.images + batch["label"].shape[0],
            state.window.steps + 1,
        )
        return TrainState(state.step + 1, params, batch_stats, optimizer_state, ema, window)

    return jax.jit(step, donate_argnums=0, out_shardings=devices.replicated(mesh))


def _divided(array: jax.Array, parts: int, mesh: Mesh) -> jax.Array:
    """Reshapes (N, ...) to (parts, N/parts, ...); each part is spread over all devices, and no
    picture moves to another device.
    """
    divided = array.reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1)
    spec = jax.sharding.PartitionSpec(None, devices.DATA_AXIS)
    return jax.lax.with_sharding_constraint(divided, jax.sharding.NamedSharding(mesh, spec))


def _decay(decay: float, step: jax.Array) -> jax.Array:
    """The decay, which is smaller in the first steps so that the initial variables fade out."""
    step = step.astype(jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1 + step) / (10 + step))
