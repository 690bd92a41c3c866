"""Runs NNX layers, with the state that they leave behind."""

from typing import Any

import jax
from flax import nnx


def pure(layer: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(layer))


@nnx.jit
def run(layer: Any, x: Any, **call: Any) -> jax.Array:
    return layer(x, **call)


def outcome(layer: Any, x: Any, **call: Any) -> Any:
    """(y, state) after a call."""
    y = run(layer, x, **call)
    return y, pure(layer)
