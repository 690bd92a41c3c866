"""One interface for the ResNets of all libraries."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

STAGES: Final = (3, 4, 6, 3)
LIBRARIES: Final = ("linen", "nnx", "haiku", "equinox", "keras", "stax", "by_hand")


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, its parameters, and what it changes as it trains.

    Attributes:
        apply: of parameters, state and images of NHWC; returns outputs and new state.
        parameters: what is trained.
        state: running statistics, and whatever else the library keeps.
    """

    apply: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
    parameters: Any
    state: Any

    def loss(self, parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        """Mean square of the outputs: enough to have every gradient computed."""
        outputs, state = self.apply(parameters, state, images)
        return jnp.mean(jnp.square(outputs)), state


def build(library: str, stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    """A ResNet of bottlenecks in training, in float32.

    Args:
        library: one of `LIBRARIES`; the package has to be there.
        stages: blocks of each stage.
        width: channels of the stem.
        shape: of the images, NHWC.
    """
    module = importlib.import_module(f"benchmarks.models.{library}")
    return module.network(tuple(stages), width, tuple(shape))
