"""A ResNet written with Equinox: one image at a time, channels first."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox
import jax
import jax.numpy as jnp

from benchmarks.models.network import STAGES, Network


def model(mode: str, stages: Sequence[int] = STAGES, width: int = 64) -> Any:
    """Returns `(model, state)`; map the model over NCHW images with a `vmap` named "batch"."""
    keys = iter(jax.random.split(jax.random.key(0), 200))

    def conv(inputs: int, outputs: int, size: int, strides: int = 1) -> Any:
        padding = size // 2
        return equinox.nn.Conv2d(
            inputs,
            outputs,
            size,
            strides,
            padding,
            use_bias=False,
            dtype=jnp.float32,
            key=next(keys),
        )

    def norm(channels: int) -> Any:
        return equinox.nn.BatchNorm(channels, "batch", mode=mode, dtype=jnp.float32)  # type: ignore[arg-type]

    class Block(equinox.Module):
        convs: list[Any]
        norms: list[Any]
        activation: Callable[[jax.Array], jax.Array]

        def __init__(self, inputs: int, inner: int, strides: int, has_projection: bool) -> None:
            self.convs = [
                conv(inputs, inner, 1),
                conv(inner, inner, 3, strides),
                conv(inner, 4 * inner, 1),
            ]
            self.norms = [norm(inner), norm(inner), norm(4 * inner)]
            if has_projection:
                self.convs.append(conv(inputs, 4 * inner, 1, strides))
                self.norms.append(norm(4 * inner))
            self.activation = jax.nn.relu

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            y, state = self.norms[0](self.convs[0](x), state)
            y, state = self.norms[1](self.convs[1](self.activation(y)), state)
            y, state = self.norms[2](self.convs[2](self.activation(y)), state)
            if len(self.convs) > 3:
                x, state = self.norms[3](self.convs[3](x), state)
            return self.activation(x + y), state

    class ResNet(equinox.Module):
        stem: Any
        stem_norm: Any
        pool: Any
        blocks: list[Any]

        def __init__(self) -> None:
            self.stem, self.stem_norm = conv(3, width, 7, 2), norm(width)
            self.pool = equinox.nn.MaxPool2d(3, 2, padding=1)
            self.blocks, channels = [], width
            for stage, size in enumerate(stages):
                for position in range(size):
                    inner = width * 2**stage
                    strides = 2 if stage > 0 and position == 0 else 1
                    self.blocks.append(Block(channels, inner, strides, position == 0))
                    channels = 4 * inner

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            x, state = self.stem_norm(self.stem(x), state)
            x = self.pool(jax.nn.relu(x))
            for block in self.blocks:
                x, state = block(x, state)
            return x.mean((1, 2)), state

    return equinox.nn.make_with_state(ResNet)()


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    whole, state = model("batch", stages, width)
    parameters, rest = equinox.partition(whole, equinox.is_inexact_array)

    def apply(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        batched = jax.vmap(
            equinox.combine(parameters, rest),
            in_axes=(0, None),
            out_axes=(0, None),
            axis_name="batch",
        )
        return batched(jnp.transpose(images, (0, 3, 1, 2)), state)

    return Network(apply, parameters, state)
