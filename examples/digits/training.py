"""Trains the fused and the plain network in turn, from the same variables on the same batches."""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final, NamedTuple

import data
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_bnar.flax_layers import BatchNorm, ResNet

STAGE_SIZES: Final = (1, 1, 1)
FILTERS: Final = 16
MOMENTUM: Final = 0.9
WEIGHT_DECAY: Final = 1e-4

NORMS: Final = {"fused": BatchNorm, "plain": nn.BatchNorm}


class State(NamedTuple):
    params: Any
    batch_stats: Any
    optimizer: Any


@dataclasses.dataclass
class Run:
    """A network in training: its compiled step and its current state."""

    net: ResNet
    step: Callable[[State, data.Digits], tuple[State, jax.Array]]
    state: State


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


@dataclasses.dataclass
class Outcome:
    """The result of training one network."""

    held_out_accuracy: float
    steps_per_second: float
    losses: list[float]


def network(norm: Any) -> ResNet:
    """A bottleneck ResNet for 8x8 images: a 3x3 stem at full size, then 8x8, 4x4 and 2x2."""
    return ResNet(
        stage_sizes=STAGE_SIZES,
        num_classes=data.CLASSES,
        num_filters=FILTERS,
        stem="small",
        norm=norm,
    )


def steps_per_epoch(digits: data.Digits, settings: Settings) -> int:
    return len(digits.labels) // settings.batch_size


def start(norm: Any, training: data.Digits, settings: Settings) -> Run:
    """A network, its initial variables (which depend only on the seed), and its compiled step."""
    net = network(norm)
    optimizer = _optimizer(settings.epochs * steps_per_epoch(training, settings), settings)
    batch = next(data.batches(training, settings.batch_size, np.random.default_rng(0)))
    variables = jax.jit(net.init)(jax.random.key(settings.seed), batch.images)
    state = State(
        variables["params"], variables["batch_stats"], optimizer.init(variables["params"])
    )
    step = jax.jit(_step(net, optimizer), donate_argnums=0)
    return Run(net, step.lower(state, batch).compile(), state)


def train(
    runs: dict[str, Run],
    training: data.Digits,
    held_out: data.Digits,
    settings: Settings,
    on_step: Callable[[], None],
) -> dict[str, Outcome]:
    """Trains all runs and returns their outcomes.

    The networks alternate at every step, so that other load on the machine affects both;
    `steps_per_second` is that of the median step, without compilation.
    """
    losses: dict[str, list[float]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    generator = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        for batch in data.batches(training, settings.batch_size, generator):
            batch = jax.device_put(batch)
            for name, run in runs.items():
                begin = time.perf_counter()
                run.state, loss = run.step(run.state, batch)
                losses[name].append(float(loss))
                seconds[name].append(time.perf_counter() - begin)
            on_step()

    return {
        name: Outcome(
            held_out_accuracy=_accuracy(run.net, run.state, held_out),
            steps_per_second=1 / median(seconds[name]),
            losses=losses[name],
        )
        for name, run in runs.items()
    }


def kernels_in_use() -> bool:
    """Whether the fused network calls our kernels on this machine, according to its program."""
    net = network(BatchNorm)
    images = jnp.zeros((2, 8, 8, 1), jnp.float32)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)
    lowered = jax.jit(lambda v, x: net.apply(v, x, mutable=["batch_stats"])).lower(
        variables, images
    )
    return "jax_bnar_forward" in lowered.as_text()


def _optimizer(total_steps: int, settings: Settings) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=min(max(1, total_steps // 10), total_steps - 1),
        decay_steps=total_steps,
    )
    return optax.chain(
        # Convolutions and the dense layer only: decay of BatchNorm's scale has no useful effect.
        optax.add_decayed_weights(
            WEIGHT_DECAY, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
        optax.sgd(schedule, momentum=MOMENTUM, nesterov=True),
    )


def _step(net: ResNet, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: State, batch: data.Digits) -> tuple[State, jax.Array]:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, updated = net.apply(
                {"params": params, "batch_stats": state.batch_stats},
                batch.images,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            return losses.mean(), updated["batch_stats"]

        (loss, batch_stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, batch_stats, optimizer_state), loss

    return step


def _accuracy(net: ResNet, state: State, digits: data.Digits) -> float:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = jax.jit(lambda v, x: net.apply(v, x, train=False))(variables, digits.images)
    return float((np.argmax(logits, axis=-1) == digits.labels).mean())
