"""Trains a small ResNet on handwritten digits, from the data to the accuracy, in one file.

    pip install '.[flax]' optax scikit-learn
    python examples/train_step.py

Each `BatchNorm(activation="relu")` is one kernel forward and one backward, with the ReLU and, at
the end of a block, the addition of the shortcut. Everything else is ordinary Flax and optax.
"""

import argparse
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jax_bnar.flax_layers import BatchNorm


class Block(nn.Module):
    """y = relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))"""

    filters: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, self.filters, use_bias=False)
        norm = functools.partial(BatchNorm, use_running_average=not train, momentum=0.9)
        y = norm(activation="relu")(conv(kernel_size=(3, 3), strides=self.stride)(x))
        y = conv(kernel_size=(3, 3))(y)
        if x.shape != y.shape:
            x = norm()(conv(kernel_size=(1, 1), strides=self.stride)(x))
        # The scale starts at 0, so that a new block is relu(shortcut(x)).
        return norm(activation="relu", scale_init=nn.initializers.zeros)(y, residual=x)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = BatchNorm(use_running_average=not train, momentum=0.9, activation="relu")(x)
        for filters, stride in ((16, 1), (32, 2), (64, 2)):
            x = Block(filters, stride)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class State(NamedTuple):
    params: Any
    batch_stats: Any  # running mean and variance of every BatchNorm
    opt_state: Any


network = Network()
optimizer = optax.adamw(3e-3, weight_decay=1e-4)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        # Training normalises with the batch's statistics and updates the running ones.
        logits, updated = network.apply(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), batch_stats, opt_state), loss


@jax.jit
def accuracy(state: State, images: jax.Array, labels: jax.Array) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    # Evaluation normalises with the running statistics and does not change them.
    logits: Any = network.apply(variables, images, train=False)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def main(epochs: int, batch_size: int, seed: int) -> None:
    digits: Any = load_digits()  # 1797 images of 8x8, part of scikit-learn
    images = (digits.images[..., None] / 16 - 0.3).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split: Any = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    images, held_out_images, labels, held_out_labels = split
    if epochs < 1 or seed < 0:
        raise SystemExit(
            f"--epochs must be at least 1 and --seed at least 0, got {epochs}, {seed}."
        )
    if not 1 <= batch_size <= len(labels):
        raise SystemExit(f"--batch-size must be from 1 to {len(labels)}, got {batch_size}.")

    variables = network.init(jax.random.key(seed), images[:1], train=False)
    params = variables["params"]
    state = State(params, variables["batch_stats"], optimizer.init(params))

    generator = np.random.default_rng(seed)
    for epoch in range(epochs):
        losses = []
        order = generator.permutation(len(labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            batch = order[start : start + batch_size]
            state, loss = train_step(state, images[batch], labels[batch])
            losses.append(loss)
        held_out = accuracy(state, held_out_images, held_out_labels)
        print(
            f"epoch {epoch + 1:2d}   loss {np.mean(losses):.4f}   held-out accuracy {held_out:.2%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small ResNet on digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
