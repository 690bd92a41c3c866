"""A ResNet in plain jax.numpy: functions of dictionaries."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.models.network import STAGES, Network


def _conv(x: jax.Array, kernel: jax.Array, strides: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def functions(
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


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    init, apply = functions(stages, width)
    parameters = init(jax.random.key(0))

    def trained(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        return apply(parameters, images, True)

    return Network(trained, parameters, None)
