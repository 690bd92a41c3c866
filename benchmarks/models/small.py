"""ResNet-18 and MobileNetV2 with `flax.linen.BatchNorm`, as torchvision defines them.

They are the networks to compare with for small pictures, and do not use `jax_bnar`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp

_CLASSES: Final = 10
# Of each stage of MobileNetV2: expansion, channels, blocks, stride of the first (the paper's
# table 2, https://arxiv.org/abs/1801.04381).
_STAGES: Final = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvNorm(nn.Module):
    """A convolution without bias, BatchNorm with batch statistics, and an activation or none."""

    features: int
    size: int
    stride: int = 1
    groups: int = 1
    activation: Callable[[jax.Array], jax.Array] | None = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Conv(
            self.features,
            (self.size, self.size),
            self.stride,
            padding=self.size // 2,
            feature_group_count=self.groups,
            use_bias=False,
            dtype=self.dtype,
        )(x)
        y = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)
        return y if self.activation is None else self.activation(y)


class ResNet18(nn.Module):
    """ResNet-18; with `small_stem` the 3x3 stem without pooling that pictures of 32x32 get."""

    small_stem: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = partial(ConvNorm, dtype=self.dtype)
        if self.small_stem:
            x = block(64, 3, activation=nn.relu)(x)
        else:
            x = block(64, 7, 2, activation=nn.relu)(x)
            around: Any = ((1, 1), (1, 1))
            x = nn.max_pool(x, (3, 3), (2, 2), padding=around)
        for stage in range(4):
            features = 64 * 2**stage
            for position in range(2):
                stride = 2 if stage > 0 and position == 0 else 1
                y = block(features, 3, stride, activation=nn.relu)(x)
                y = block(features, 3)(y)
                if x.shape != y.shape:
                    x = block(features, 1, stride)(x)
                x = nn.relu(x + y)
        return nn.Dense(_CLASSES, dtype=self.dtype)(x.mean((1, 2)))


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1; with `small_stem` its first two strides are 1, for 32x32."""

    small_stem: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = partial(ConvNorm, dtype=self.dtype)
        x = block(32, 3, 1 if self.small_stem else 2, activation=nn.relu6)(x)
        for stage, (expansion, features, blocks, stride) in enumerate(_STAGES):
            for position in range(blocks):
                strided = position == 0 and not (self.small_stem and stage == 1)
                hidden = expansion * x.shape[-1]
                y = block(hidden, 1, activation=nn.relu6)(x) if expansion > 1 else x
                y = block(hidden, 3, stride if strided else 1, groups=hidden, activation=nn.relu6)(
                    y
                )
                y = block(features, 1)(y)
                x = x + y if x.shape == y.shape else y
        x = block(1280, 1, activation=nn.relu6)(x)
        return nn.Dense(_CLASSES, dtype=self.dtype)(x.mean((1, 2)))


NETWORKS: Final[dict[str, Any]] = {"ResNet-18": ResNet18, "MobileNetV2": MobileNetV2}
