"""The compiled functions of a training."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from resnet50 import accuracy, devices, inference, optimizer, train_state, train_step
from resnet50.config import Training
from resnet50.data.sources import Dataset
from resnet50.train_state import TrainState, Window


@dataclasses.dataclass(frozen=True)
class Programs:
    """What runs on the devices.

    Attributes:
        optimizer: what the step updates the variables with.
        initial: makes the state before the first step from a random key.
        step: one step on one batch.
        sums: evaluates one batch.
        all_finite: whether a state is worth saving.
        empty_window: the sums before the first step of a line of metrics.
    """

    optimizer: optax.GradientTransformation
    initial: Callable[[jax.Array], TrainState]
    step: train_step.Step
    sums: Callable[[Any, Any], dict[str, jax.Array]]
    all_finite: Callable[[TrainState], jax.Array]
    empty_window: Callable[[], Window]


def build(
    net: nn.Module, recipe: Training, dataset: Dataset, learning_rate: optax.Schedule, mesh: Mesh
) -> Programs:
    sgd = optimizer.make(recipe, learning_rate)
    mean, std = dataset.mean, dataset.std
    everywhere = devices.replicated(mesh)

    def initial(key: jax.Array) -> TrainState:
        return train_state.initial(net, dataset.image_shape, sgd, recipe.ema_decay > 0, key)

    return Programs(
        optimizer=sgd,
        initial=jax.jit(initial, out_shardings=everywhere),
        step=train_step.compiled(net, sgd, recipe, mean, std, mesh),
        sums=accuracy.compiled(inference.logits_function(net, mean, std), mesh),
        all_finite=jax.jit(train_state.all_finite),
        empty_window=jax.jit(Window.empty, out_shardings=everywhere),
    )
