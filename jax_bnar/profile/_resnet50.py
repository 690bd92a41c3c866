"""The programs that `--emit` runs: ResNet-50 with folded BatchNorm, or a training step."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar.flax_layers import ResNet, fold_batch_norms

_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        batch: the number of images.
        size: height and width of an image.
        dtype: the dtype of activations; parameters are float32.
        train: whether to run a training step (forward, backward, SGD) instead of inference.
        norm: "fused" for this package's layers, "flax" for `flax.linen.BatchNorm`, which is not
            folded into the convolutions.
        steps: how often the program runs; the step of median kernel time is written.
        stage_sizes: the number of blocks in each stage.
    """

    batch: int = 10
    size: int = 224
    dtype: str = "float32"
    train: bool = False
    norm: str = "fused"
    steps: int = 5
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)


def compiled(settings: Settings) -> tuple[Any, tuple[Any, ...]]:
    """A compiled program, and arguments for it with random values."""
    net = ResNet(
        stage_sizes=settings.stage_sizes, num_classes=_CLASSES, dtype=jnp.dtype(settings.dtype)
    )
    if settings.norm == "flax":
        net = net.clone(norm=nn.BatchNorm)
    random = np.random.default_rng(0)
    shape = (settings.batch, settings.size, settings.size, 3)
    images = jnp.asarray(random.standard_normal(shape), jnp.float32)
    variables = random_variables(net, images)
    if settings.train:
        labels = jnp.asarray(random.integers(0, _CLASSES, settings.batch), jnp.int32)
        arguments: tuple[Any, ...] = (variables, images, labels)
        step = jax.jit(functools.partial(_training_step, net))
        return step.lower(*arguments).compile(), arguments
    if settings.norm == "fused":
        net, variables = fold_batch_norms(net, variables)
    arguments = (variables, images)
    infer = jax.jit(functools.partial(net.apply, train=False))
    return infer.lower(*arguments).compile(), arguments


def _training_step(net: ResNet, variables: Any, images: jax.Array, labels: jax.Array) -> Any:
    def loss(params: Any) -> Any:
        logits, updates = net.apply(
            {**variables, "params": params}, images, train=True, mutable=["batch_stats"]
        )
        logarithms = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(logarithms, labels[:, None], axis=1).mean(), updates

    (value, updates), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    rate = jnp.float32(0.1)
    params = jax.tree.map(lambda p, g: p - rate * g, variables["params"], gradients)
    return value, {"params": params, **updates}


def random_variables(net: ResNet, images: jax.Array) -> Any:
    """Random variables; a new network's would not do, since some of its scales are 0."""
    tree = jax.eval_shape(net.init, jax.random.key(0), images)
    random = np.random.default_rng(1)

    def value(path: Any, leaf: Any) -> jax.Array:
        if path[-1].key in ("scale", "var"):
            values = random.uniform(0.5, 1.5, leaf.shape)
        else:
            values = random.standard_normal(leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, tree)
