"""ResNet v1.5 with `flax.linen.BatchNorm`, module for module as in Flax's ImageNet example.

This is the network to compare with. It does not use `jax_bnar`, and Linen numbers its modules.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.network import Network

# Flax's fast variance is not accurate enough to compare with.
NORM = functools.partial(nn.BatchNorm, use_fast_variance=False)


class BottleneckResNetBlock(nn.Module):
    filters: int
    strides: tuple[int, int]
    conv: Any
    norm: Any
    shortcut: tuple[str, str] = ("conv_proj", "norm_proj")

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(y)))
        y = self.conv(4 * self.filters, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if x.shape != y.shape:
            conv, norm = self.shortcut
            x = self.conv(4 * self.filters, (1, 1), self.strides, name=conv)(x)
            x = self.norm(name=norm)(x)
        return nn.relu(x + y)


class PlainResNet(nn.Module):
    """With `algoperf` it has the names and the pooling of that workload."""

    stage_sizes: Sequence[int]
    num_classes: int
    num_filters: int = 64
    dtype: Any = jnp.float32
    algoperf: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            NORM, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        stem, shortcut = ("conv_init", "bn_init"), ("conv_proj", "norm_proj")
        if self.algoperf:
            stem, shortcut = ("Conv_init", "BatchNorm_init"), ("Conv_proj", "BatchNorm_proj")
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3)] * 2, name=stem[0])(x)
        x = nn.relu(norm(name=stem[1])(x))
        ends: Any = ((1, 1), (1, 1)) if self.algoperf else "SAME"
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=ends)
        for stage, size in enumerate(self.stage_sizes):
            for position in range(size):
                strides = (2, 2) if stage > 0 and position == 0 else (1, 1)
                filters = self.num_filters * 2**stage
                x = BottleneckResNetBlock(filters, strides, conv, norm, shortcut)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x.mean(axis=(1, 2)))


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    net = PlainResNet(stages, 10, width)
    variables = net.init(jax.random.key(0), jnp.zeros(shape, jnp.float32))

    def apply(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": parameters, "batch_stats": state}
        outputs, updated = net.apply(variables, images, True, mutable=["batch_stats"])
        return jnp.asarray(outputs), updated["batch_stats"]

    return Network(apply, variables["params"], variables["batch_stats"])
