"""A ResNet written with `jax.example_libraries.stax`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.example_libraries import stax

from benchmarks.models.network import STAGES, Network


def model(stages: Sequence[int] = STAGES, width: int = 64) -> tuple[Any, Any]:
    """Returns stax's `(init, apply)`; stax has no running statistics."""

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
    layers.append(stax.MaxPool((3, 3), (2, 2), "SAME"))
    for stage, size in enumerate(stages):
        for position in range(size):
            strides = 2 if stage > 0 and position == 0 else 1
            layers.append(block(width * 2**stage, strides, position == 0))
    return stax.serial(*layers)


def network(stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    init, apply = model(stages, width)
    _, parameters = init(jax.random.key(0), tuple(shape))
    parameters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters)

    def trained(parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        return apply(parameters, images), state

    return Network(trained, parameters, None)
