"""A training step of ResNet-50 with a given BatchNorm, as functions that nothing has compiled."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from jax_bnar.flax_layers import ResNet, ResNet50

CLASSES: Final = 1000
# A function from (params, batch_stats, (images, labels)) to (loss, the new batch_stats).
LossFunction = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def resnet50(norm: Any, dtype: str, stage_sizes: Sequence[int] = (3, 4, 6, 3)) -> ResNet:
    """The network with this class of BatchNorm; parameters are float32."""
    return ResNet50(
        stage_sizes=tuple(stage_sizes), num_classes=CLASSES, dtype=jnp.dtype(dtype), norm=norm
    )


def loss_function(net: ResNet) -> LossFunction:
    """The mean cross-entropy, computed in float32."""

    def loss_of(params: Any, batch_stats: Any, data: Any) -> tuple[jax.Array, Any]:
        images, labels = data
        logits, updated = net.apply(
            {"params": params, "batch_stats": batch_stats}, images, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            jnp.asarray(logits, jnp.float32), labels
        )
        return losses.mean(), updated["batch_stats"]

    return loss_of


def optimizer() -> optax.GradientTransformation:
    """SGD with Nesterov momentum."""
    return optax.sgd(0.1, momentum=0.9, nesterov=True)


def initial_state(variables: Any) -> tuple[Any, Any, Any]:
    """The parameters, the running statistics, and the state of the optimizer."""
    params = variables["params"]
    return params, variables["batch_stats"], optimizer().init(params)


def sgd_step(loss_of: LossFunction) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """A function from (state, data) to (the new state, loss)."""
    sgd = optimizer()

    def step(state: Any, data: Any) -> tuple[Any, jax.Array]:
        params, batch_stats, momentum = state
        (loss, batch_stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(
            params, batch_stats, data
        )
        updates, momentum = sgd.update(gradient, momentum, params)
        return (optax.apply_updates(params, updates), batch_stats, momentum), loss

    return step
