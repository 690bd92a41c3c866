"""A block of each architecture, in Flax, as its users write it: with plain operations after a norm.

Each has what its paper has around the BatchNorm, because that is what XLA fuses with it: residuals,
concatenations, gates, pools, dropout.
"""

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn


class Net(nn.Module):
    """A block with a norm of the caller's.

    Attributes:
        name_of_block: one of `BLOCKS`.
        norm: the class of the norms.
        dtype: that of the arrays.
    """

    name_of_block: str
    norm: Callable[..., Any]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return BLOCKS[self.name_of_block].function(self, x)

    def bn(self, x: jax.Array, axis: int = -1) -> jax.Array:
        return self.norm(use_running_average=False, axis=axis, dtype=self.dtype)(x)

    def instance_norm(self, x: jax.Array) -> jax.Array:
        """That of Flax, because we have no layer of this kind."""
        return nn.InstanceNorm(dtype=self.dtype)(x)

    def relu(self, x: jax.Array) -> jax.Array:
        return nn.relu(self.bn(x))

    def silu(self, x: jax.Array) -> jax.Array:
        return nn.silu(self.bn(x))

    def conv(
        self, x: jax.Array, channels: int, size: int = 3, stride: int = 1, groups: int = 1
    ) -> jax.Array:
        axes = x.ndim - 2
        return nn.Conv(
            channels,
            (size,) * axes,
            (stride,) * axes,
            feature_group_count=groups,
            use_bias=False,
            dtype=self.dtype,
        )(x)

    def depthwise(self, x: jax.Array, size: int = 3) -> jax.Array:
        return self.conv(x, x.shape[-1], size, groups=x.shape[-1])

    def dense(self, x: jax.Array, channels: int) -> jax.Array:
        return nn.Dense(channels, use_bias=False, dtype=self.dtype)(x)

    def squeeze_excite(
        self, x: jax.Array, activation: Callable[..., Any], gate: Callable[..., Any]
    ) -> jax.Array:
        means = jnp.mean(x, (1, 2), keepdims=True)
        hidden = activation(self.conv(means, x.shape[-1] // 4, 1))
        return x * gate(self.conv(hidden, x.shape[-1], 1))


def vgg(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = net.relu(net.conv(x, x.shape[-1]))
    return x


def preactivation(net: Net, x: jax.Array) -> jax.Array:
    channels = x.shape[-1]
    x = net.conv(x, channels)
    for _ in range(2):
        x = x + net.conv(net.relu(net.conv(net.relu(x), channels)), channels)
    return net.relu(x)


def densenet(net: Net, x: jax.Array) -> jax.Array:
    x = net.conv(x, x.shape[-1])
    for _ in range(4):
        y = net.conv(net.relu(net.conv(net.relu(x), 128, 1)), 32)
        x = jnp.concatenate([x, y], -1)
    return net.conv(net.relu(x), x.shape[-1] // 2, 1)


def u_net(net: Net, x: jax.Array) -> jax.Array:
    def twice(x: jax.Array, channels: int) -> jax.Array:
        for _ in range(2):
            x = net.relu(net.conv(x, channels))
        return x

    high = twice(x, 64)
    low = twice(nn.max_pool(high, (2, 2), (2, 2)), 128)
    up = nn.ConvTranspose(64, (2, 2), (2, 2), dtype=net.dtype)(low)
    return twice(jnp.concatenate([high, up], -1), 64)


def inception(net: Net, x: jax.Array) -> jax.Array:
    def unit(x: jax.Array, channels: int, size: int) -> jax.Array:
        return net.relu(net.conv(x, channels, size))

    pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME")
    branches = [
        unit(x, 64, 1),
        unit(unit(x, 96, 1), 128, 3),
        unit(unit(x, 16, 1), 32, 5),
        unit(pooled, 32, 1),
    ]
    return jnp.concatenate(branches, -1)


def mobilenet_v3(net: Net, x: jax.Array) -> jax.Array:
    y = nn.hard_swish(net.bn(net.conv(x, 4 * x.shape[-1], 1)))
    y = nn.hard_swish(net.bn(net.depthwise(y, 5)))
    y = net.squeeze_excite(y, nn.relu, nn.hard_sigmoid)
    return x + net.bn(net.conv(y, x.shape[-1], 1))


def efficientnet(net: Net, x: jax.Array) -> jax.Array:
    y = net.silu(net.depthwise(net.silu(net.conv(x, 6 * x.shape[-1], 1))))
    y = net.squeeze_excite(y, nn.silu, nn.sigmoid)
    return x + net.bn(net.conv(y, x.shape[-1], 1))


def se_resnet(net: Net, x: jax.Array) -> jax.Array:
    channels = x.shape[-1]
    y = net.relu(net.conv(net.relu(net.conv(x, channels // 4, 1)), channels // 4))
    y = net.bn(net.conv(y, channels, 1))
    return nn.relu(x + net.squeeze_excite(y, nn.relu, nn.sigmoid))


def shufflenet(net: Net, x: jax.Array) -> jax.Array:
    left, right = jnp.split(x, 2, -1)
    channels = right.shape[-1]
    right = net.bn(net.depthwise(net.relu(net.conv(right, channels, 1))))
    y = jnp.concatenate([left, net.relu(net.conv(right, channels, 1))], -1)
    return y.reshape(*y.shape[:-1], 2, channels).swapaxes(-1, -2).reshape(y.shape)


def dcgan(net: Net, x: jax.Array) -> jax.Array:
    for channels in (128, 256):
        x = nn.leaky_relu(net.bn(net.conv(x, channels, 4, 2)), 0.2)
    return x


def repvgg(net: Net, x: jax.Array) -> jax.Array:
    x = net.conv(x, x.shape[-1])
    for _ in range(2):
        branches = net.bn(net.conv(x, x.shape[-1])), net.bn(net.conv(x, x.shape[-1], 1)), net.bn(x)
        x = nn.relu(sum(branches))
    return x


def csp_darknet(net: Net, x: jax.Array) -> jax.Array:
    channels = x.shape[-1]
    parts = list(jnp.split(net.silu(net.conv(x, channels, 1)), 2, -1))
    for _ in range(2):
        y = net.silu(net.conv(net.silu(net.conv(parts[-1], channels // 2)), channels // 2))
        parts.append(parts[-1] + y)
    return net.silu(net.conv(jnp.concatenate(parts, -1), channels, 1))


def hrnet(net: Net, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    low = net.relu(net.conv(x, 2 * x.shape[-1], 3, 2))
    up = net.bn(net.conv(low, x.shape[-1], 1))
    up = jnp.repeat(jnp.repeat(up, 2, 1), 2, 2)
    return nn.relu(x + up), nn.relu(low + net.bn(net.conv(x, low.shape[-1], 3, 2)))


def xception(net: Net, x: jax.Array) -> jax.Array:
    y = x
    for _ in range(3):
        y = net.bn(net.conv(net.depthwise(nn.relu(y)), x.shape[-1], 1))
    return x + y


def wide_resnet(net: Net, x: jax.Array) -> jax.Array:
    y = net.relu(net.conv(x, x.shape[-1]))
    y = nn.Dropout(0.1, deterministic=False)(y)
    return nn.relu(net.bn(net.conv(y, x.shape[-1])) + x)


def norm_after_relu(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = net.bn(nn.relu(net.conv(x, x.shape[-1])))
    return x


def convmixer(net: Net, x: jax.Array) -> jax.Array:
    channels = x.shape[-1]
    for _ in range(2):
        x = x + net.bn(nn.gelu(net.depthwise(x, 9)))
        x = net.bn(nn.gelu(net.conv(x, channels, 1)))
    return x


def tdnn(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = nn.Conv(x.shape[-1], (3,), dtype=net.dtype)(x)
        x = net.bn(nn.relu(x))
    return x


def norms_in_float32(net: Net, x: jax.Array) -> jax.Array:
    """As with Haiku's policies of mixed precision: residuals are in float32, too."""

    def wide(x: jax.Array) -> jax.Array:
        return net.norm(use_running_average=False, dtype=jnp.float32)(net.conv(x, x.shape[-1]))

    for _ in range(2):
        y = wide(nn.relu(wide(x)))
        x = nn.relu(y + x)
    return x.astype(net.dtype)


def norm_after_dropout(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = nn.relu(net.dense(x, x.shape[-1]))
        x = net.bn(nn.Dropout(0.5, deterministic=False)(x))
    return x


def perceptron(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = net.relu(net.dense(x, x.shape[-1]))
    return x


def pointnet(net: Net, x: jax.Array) -> jax.Array:
    for channels in (64, 128, 1024):
        x = net.relu(net.dense(x, channels))
    return x.max(1)


def dgcnn(net: Net, x: jax.Array) -> jax.Array:
    for channels in (64, 128):
        x = net.relu(net.dense(x, channels))
    return x.max(2)


def conformer(net: Net, x: jax.Array) -> jax.Array:
    return net.dense(net.silu(net.depthwise(x, 31)), x.shape[-1])


def c3d(net: Net, x: jax.Array) -> jax.Array:
    return nn.relu(net.bn(net.conv(net.relu(net.conv(x, x.shape[-1])), x.shape[-1])) + x)


def cycle_gan(net: Net, x: jax.Array) -> jax.Array:
    x = net.conv(x, x.shape[-1])
    for _ in range(2):
        y = nn.relu(net.instance_norm(net.conv(x, x.shape[-1])))
        x = x + net.instance_norm(net.conv(y, x.shape[-1]))
    return net.conv(x, x.shape[-1])


def nn_u_net(net: Net, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = nn.leaky_relu(net.instance_norm(net.conv(x, x.shape[-1])), 0.01)
    return x


def channels_first(net: Net, x: jax.Array) -> jax.Array:
    channels = x.shape[1]
    for number in range(2):
        shape = (channels, channels, 3, 3)
        kernel = net.param(f"kernel_{number}", nn.initializers.lecun_normal(), shape, net.dtype)
        y = jax.lax.conv(x, kernel, (1, 1), "SAME")
        x = nn.relu(net.bn(y, axis=1) + x)
    return x


class Block(NamedTuple):
    """A block and the shape of its input."""

    function: Callable[[Net, jax.Array], Any]
    shape: tuple[int, ...]


def check_names(names: Collection[str]) -> None:
    """SystemExit if one of the names that a command was given is not that of a block."""
    if unknown := set(names) - BLOCKS.keys():
        raise SystemExit(f"--block must be of {', '.join(BLOCKS)}; got {', '.join(unknown)}.")


BLOCKS: Final = {
    "VGG": Block(vgg, (64, 56, 56, 64)),
    "ResNet v2": Block(preactivation, (64, 32, 32, 128)),
    "DenseNet": Block(densenet, (64, 56, 56, 64)),
    "U-Net": Block(u_net, (16, 256, 256, 32)),
    "Inception": Block(inception, (64, 28, 28, 192)),
    "MobileNetV3": Block(mobilenet_v3, (64, 28, 28, 40)),
    "EfficientNet": Block(efficientnet, (64, 56, 56, 24)),
    "SE-ResNet": Block(se_resnet, (64, 56, 56, 256)),
    "ShuffleNetV2": Block(shufflenet, (64, 28, 28, 116)),
    "DCGAN": Block(dcgan, (64, 64, 64, 64)),
    "RepVGG": Block(repvgg, (64, 28, 28, 128)),
    "CSPDarknet": Block(csp_darknet, (16, 80, 80, 128)),
    "HRNet": Block(hrnet, (64, 56, 56, 64)),
    "Xception": Block(xception, (64, 28, 28, 256)),
    "Wide ResNet": Block(wide_resnet, (64, 32, 32, 128)),
    "norm after ReLU": Block(norm_after_relu, (64, 56, 56, 64)),
    "norms in float32": Block(norms_in_float32, (64, 56, 56, 64)),
    "norm after dropout": Block(norm_after_dropout, (65536, 1024)),
    "ConvMixer": Block(convmixer, (64, 32, 32, 256)),
    "TDNN": Block(tdnn, (64, 300, 512)),
    "perceptron": Block(perceptron, (65536, 1024)),
    "PointNet": Block(pointnet, (64, 2048, 64)),
    "DGCNN": Block(dgcnn, (16, 1024, 20, 64)),
    "Conformer": Block(conformer, (64, 1024, 256)),
    "C3D": Block(c3d, (8, 16, 56, 56, 64)),
    "CycleGAN": Block(cycle_gan, (4, 64, 64, 256)),
    "nnU-Net": Block(nn_u_net, (2, 64, 96, 96, 32)),
    "channels first": Block(channels_first, (64, 64, 56, 56)),
}
