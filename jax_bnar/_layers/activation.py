"""The activation argument of a layer, and the part of it that the operators can fuse."""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import jax

from jax_bnar._base.config import Activation

# What a user may pass. Linen's `nn.relu` and `nnx.relu` are the same object as `jax.nn.relu`.
ActivationLike = Literal["relu", "none"] | Callable[..., Any] | None


class LayerActivation(NamedTuple):
    """An activation, split into a fused and an unfused part.

    Attributes:
        fused: the part that the operator applies.
        after: the function that plain JAX applies to the operator's result, or None.
    """

    fused: Activation
    after: Callable[..., Any] | None = None

    def finish(self, y: jax.Array) -> jax.Array:
        """Applies the rest of the activation to a y to which the operator has applied `fused`."""
        if self.after is None:
            return y
        result = self.after(y)
        if not (hasattr(result, "shape") and hasattr(result, "dtype")):
            raise TypeError(
                f"BatchNorm: activation must return an array, but {self.after!r} returned"
                f" {type(result).__name__}."
            )
        return result

    def unfused(self, y: jax.Array) -> jax.Array:
        """Applies the whole activation to a y to which nothing has been applied."""
        return self.finish(jax.nn.relu(y) if self.fused == "relu" else y)


RELU: Final = LayerActivation("relu")
NONE: Final = LayerActivation("none")


def layer_activation(layer: str, field: str, given: Any) -> LayerActivation:
    """Validates and splits the value that a layer's field was given.

    Raises:
        ValueError: the value is a string that does not name an activation.
        TypeError: the value is a class, or it is not a string, None or a callable.
    """
    if isinstance(given, str):
        if given not in ("relu", "none"):
            raise ValueError(
                f"{layer}: {field} must be 'relu', 'none', None or a callable, got {given!r}; pass"
                " other activations as functions, such as jax.nn.gelu."
            )
        return LayerActivation(given)
    if given is None:
        return NONE
    if given is jax.nn.relu:
        return RELU
    if isinstance(given, type):
        raise TypeError(
            f"{layer}: {field} must be 'relu', 'none', None or a callable, got the class"
            f" {given.__name__}; pass an instance of it."
        )
    if not callable(given):
        raise TypeError(
            f"{layer}: {field} must be 'relu', 'none', None or a callable, got {given!r} of type"
            f" {type(given).__name__}."
        )
    return LayerActivation("none", given)
