"""SGD with Nesterov momentum; linear warmup, then cosine decay to 0."""

from typing import Any

import jax
import optax

from resnet50.config import Training


def warmup_epochs(options: Training) -> float:
    """The warmup that was asked for, or half of a training that is not longer than that."""
    if options.warmup_epochs < options.epochs:
        return options.warmup_epochs
    return options.epochs / 2


def schedule(options: Training, steps_per_epoch: float, total_steps: int) -> optax.Schedule:
    """The learning rate of each step; the peak scales with the batch size (Goyal et al. 2017)."""
    peak = options.learning_rate * options.batch_size / 256
    # The decay keeps at least one step, even in a training of one step or two.
    warmup = min(round(warmup_epochs(options) * steps_per_epoch), total_steps - 1)
    cosine = optax.cosine_decay_schedule(peak, total_steps - warmup)
    if not warmup:
        return cosine
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), cosine], [warmup])


def make(options: Training, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(options.weight_decay, mask=decayed),
        optax.sgd(learning_rate, momentum=options.momentum, nesterov=True),
    )


def decayed(params: Any) -> Any:
    """True for kernels only. Biases and BatchNorm's scale and bias are vectors and have no decay:
    decay of a scale would only change the learning rate of the convolution before it.
    """
    return jax.tree.map(lambda p: p.ndim > 1, params)
