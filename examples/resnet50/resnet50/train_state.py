"""Everything that training changes and a checkpoint must contain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


class Window(NamedTuple):
    """Sums since the last line of metrics.

    They are part of the state rather than of the loop, so that a resumed run writes the same lines.
    """

    loss: jax.Array
    correct: jax.Array
    images: jax.Array
    steps: jax.Array

    @classmethod
    def empty(cls) -> "Window":
        return cls(*(jnp.zeros((), d) for d in (jnp.float32, jnp.int32, jnp.int32, jnp.int32)))


class TrainState(NamedTuple):
    """Variables, optimizer state, moving average and counters."""

    step: jax.Array
    params: Any
    batch_stats: Any
    optimizer: Any
    ema: Any
    """Moving average of {"params", "batch_stats"}, or an empty dict."""
    window: Window

    @property
    def variables(self) -> dict[str, Any]:
        return {"params": self.params, "batch_stats": self.batch_stats}


def initial(
    net: nn.Module,
    image_shape: tuple[int, int, int],
    optimizer: optax.GradientTransformation,
    with_ema: bool,
    key: jax.Array,
) -> TrainState:
    """A state with new variables, which depend only on the key."""
    variables = net.init(key, jnp.zeros((2, *image_shape), jnp.float32))
    return begin(dict(variables), optimizer, with_ema)


def begin(
    variables: dict[str, Any], optimizer: optax.GradientTransformation, with_ema: bool
) -> TrainState:
    """The state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        optimizer=optimizer.init(variables["params"]),
        # A copy, because both are donated to the same call.
        ema=jax.tree.map(jnp.copy, variables) if with_ema else {},
        window=Window.empty(),
    )


def all_finite(state: TrainState) -> jax.Array:
    """Whether the network, and the losses since the last line of metrics, are finite numbers."""
    leaves = jax.tree.leaves((state.variables, state.window.loss))
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
