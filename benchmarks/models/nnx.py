"""A ResNet written with Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models.network import STAGES, Network


def model(stages: Sequence[int] = STAGES, width: int = 64, dtype: Any = jnp.float32) -> Any:
    """A Flax NNX module: call `model(x)` after `model.train()` or `model.eval()`."""
    rngs = nnx.Rngs(0)

    def conv(inputs: int, outputs: int, size: int, strides: int = 1) -> Any:
        return nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides,
            use_bias=False,
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )

    def norm(channels: int) -> Any:
        return nnx.BatchNorm(channels, momentum=0.9, dtype=dtype, rngs=rngs)

    class Block(nnx.Module):
        def __init__(self, inputs: int, inner: int, strides: int, has_projection: bool) -> None:
            self.conv1, self.norm1 = conv(inputs, inner, 1), norm(inner)
            self.conv2, self.norm2 = conv(inner, inner, 3, strides), norm(inner)
            self.conv3, self.norm3 = conv(inner, 4 * inner, 1), norm(4 * inner)
            self.has_projection = has_projection
            if has_projection:
                self.conv4, self.norm4 = conv(inputs, 4 * inner, 1, strides), norm(4 * inner)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = nnx.relu(self.norm1(self.conv1(x)))
            y = nnx.relu(self.norm2(self.conv2(y)))
            y = self.norm3(self.conv3(y))
            if self.has_projection:
                x = self.norm4(self.conv4(x))
            return nnx.relu(x + y)

    class ResNet(nnx.Module):
        def __init__(self) -> None:
            self.stem, self.stem_norm = conv(3, width, 7, 2), norm(width)
            blocks, channels = [], width
            for stage, size in enumerate(stages):
                for position in range(size):
                    inner = width * 2**stage
                    strides = 2 if stage > 0 and position == 0 else 1
                    blocks.append(Block(channels, inner, strides, position == 0))
                    channels = 4 * inner
            self.blocks = nnx.List(blocks)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.stem_norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
            for block in self.blocks:
                x = block(x)
            return x.mean((1, 2))

    return ResNet()


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    trained = model(stages, width)
    trained.train()
    definition, parameters, state = nnx.split(trained, nnx.Param, ...)

    def apply(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        net = nnx.merge(definition, parameters, state, copy=True)
        outputs = net(images)
        return outputs, nnx.split(net, nnx.Param, ...)[2]

    return Network(apply, parameters, state)
