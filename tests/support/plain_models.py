"""ResNets of other libraries and by hand, with nothing of `jax_bnar` in them.

Each builder takes the blocks of each stage and the width, and gives a function of (x, train) with
whatever state it needs bound as its first argument.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

STAGES = (3, 4, 6, 3)


def _conv(x: jax.Array, kernel: jax.Array, strides: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def by_hand(
    stages: Sequence[int] = STAGES, width: int = 64
) -> tuple[Callable[[jax.Array], Any], Callable[..., Any]]:
    """Functions of dictionaries: `init(key)` and `apply(parameters, x, train)`."""

    def blocks() -> Any:
        channels = width
        for stage, size in enumerate(stages):
            for position in range(size):
                inner = width * 2**stage
                strides = 2 if stage > 0 and position == 0 else 1
                yield f"block{stage}_{position}", channels, inner, strides, position == 0
                channels = 4 * inner

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 4 * sum(stages) + 1))

        def conv(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * (2 / shape[2]) ** 0.5 / 3

        def norm(channels: int) -> dict[str, jax.Array]:
            ones, zeros = jnp.ones(channels, jnp.float32), jnp.zeros(channels, jnp.float32)
            return {"scale": ones, "bias": zeros + 0.1, "mean": zeros, "var": ones}

        parameters: dict[str, Any] = {"stem": conv(7, 7, 3, width), "stem_norm": norm(width)}
        for name, channels, inner, _, has_projection in blocks():
            parameters[name] = {
                "convs": [
                    conv(1, 1, channels, inner),
                    conv(3, 3, inner, inner),
                    conv(1, 1, inner, 4 * inner),
                ],
                "norms": [norm(inner), norm(inner), norm(4 * inner)],
            }
            if has_projection:
                parameters[name]["convs"].append(conv(1, 1, channels, 4 * inner))
                parameters[name]["norms"].append(norm(4 * inner))
        return parameters

    def apply(parameters: Any, x: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        state = jax.tree.map(lambda leaf: leaf, parameters)

        def norm(v: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            mean, var = v["mean"], v["var"]
            if train:
                mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
                v["mean"] = 0.9 * v["mean"] + 0.1 * mean
                v["var"] = 0.9 * v["var"] + 0.1 * var
            slope = v["scale"] * lax.rsqrt(var + 1e-5)
            return (x - mean[None, None, None]) * slope[None, None, None] + v["bias"][
                None, None, None
            ]

        x = jax.nn.relu(norm(state["stem_norm"], _conv(x, state["stem"], 2)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for name, _, _, strides, has_projection in blocks():
            block = state[name]
            convs, norms = block["convs"], block["norms"]
            y = jax.nn.relu(norm(norms[0], _conv(x, convs[0])))
            y = jax.nn.relu(norm(norms[1], _conv(y, convs[1], strides)))
            y = norm(norms[2], _conv(y, convs[2]))
            shortcut = norm(norms[3], _conv(x, convs[3], strides)) if has_projection else x
            x = jax.nn.relu(y + shortcut)
        return x.mean((1, 2)), state

    return init, apply


def nnx_model(stages: Sequence[int] = STAGES, width: int = 64, dtype: Any = jnp.float32) -> Any:
    """A module of Flax NNX: `model(x)`, after `model.train()` or `model.eval()`."""
    from flax import nnx

    rngs = nnx.Rngs(0)

    def conv(inputs: int, outputs: int, size: int, strides: int = 1) -> Any:
        return nnx.Conv(
            inputs, outputs, (size, size), strides, use_bias=False, dtype=dtype, rngs=rngs
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


def equinox_model(mode: str, stages: Sequence[int] = STAGES, width: int = 64) -> Any:
    """`(model, state)`; the model takes one image in NCHW, under a `vmap` named "batch"."""
    import equinox as eqx

    keys = iter(jax.random.split(jax.random.key(0), 200))

    def conv(inputs: int, outputs: int, size: int, strides: int = 1) -> Any:
        padding = size // 2
        return eqx.nn.Conv2d(
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
        return eqx.nn.BatchNorm(channels, "batch", mode=mode, dtype=jnp.float32)  # type: ignore[arg-type]

    class Block(eqx.Module):
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

    class ResNet(eqx.Module):
        stem: Any
        stem_norm: Any
        pool: Any
        blocks: list[Any]

        def __init__(self) -> None:
            self.stem, self.stem_norm = conv(3, width, 7, 2), norm(width)
            self.pool = eqx.nn.MaxPool2d(3, 2, padding=1)
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

    return eqx.nn.make_with_state(ResNet)()


def stax_model(stages: Sequence[int] = STAGES, width: int = 64) -> tuple[Any, Any]:
    """`(init, apply)` of `jax.example_libraries.stax`; it has no running statistics."""
    from jax.example_libraries import stax

    def block(inner: int, strides: int, has_projection: bool) -> Any:
        main = stax.serial(
            stax.Conv(inner, (1, 1)),
            stax.BatchNorm(),
            stax.Relu,
            stax.Conv(inner, (3, 3), (strides, strides), "SAME"),
            stax.BatchNorm(),
            stax.Relu,
            stax.Conv(4 * inner, (1, 1)),
            stax.BatchNorm(),
        )
        shortcut = stax.Identity
        if has_projection:
            projection = stax.Conv(4 * inner, (1, 1), (strides, strides))
            shortcut = stax.serial(projection, stax.BatchNorm())
        return stax.serial(stax.FanOut(2), stax.parallel(main, shortcut), stax.FanInSum, stax.Relu)

    layers = [stax.Conv(width, (7, 7), (2, 2), "SAME"), stax.BatchNorm(), stax.Relu]
    for stage, size in enumerate(stages):
        for position in range(size):
            strides = 2 if stage > 0 and position == 0 else 1
            layers.append(block(width * 2**stage, strides, position == 0))
    return stax.serial(*layers)
