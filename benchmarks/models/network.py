"""A common interface to the ResNets of all libraries."""

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
    """A network, its parameters, and the state that changes in training.

    Attributes:
        apply: takes parameters, state and NHWC images, and returns outputs and new state.
        parameters: the trainable parameters.
        state: running statistics, and whatever else the library keeps.
    """

    apply: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
    parameters: Any
    state: Any

    def loss(self, parameters: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        """The mean square of the outputs, which is enough to require every gradient."""
        outputs, state = self.apply(parameters, state, images)
        return jnp.mean(jnp.square(outputs)), state


def build(library: str, stages: Sequence[int], width: int, shape: Sequence[int]) -> Network:
    """Creates a float32 ResNet with bottleneck blocks, in training mode.

    Args:
        library: one of `LIBRARIES`; its package must be installed.
        stages: the number of blocks in each stage.
        width: the number of channels of the stem.
        shape: the NHWC shape of the images.
    """
    module = importlib.import_module(f"benchmarks.models.{library}")
    return module.network(tuple(stages), width, tuple(shape))
