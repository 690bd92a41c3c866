"""The activation argument of a layer, and the part of it that the operators can fuse."""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import jax

from jax_bnar._base.activations import (
    Activation,
    FusedActivation,
    activate,
    fused_activation,
    names,
)
from jax_bnar._operators.validation import described_value

# What a user may pass.
ActivationLike = Activation | Literal["swish", "hard_swish"] | Callable[..., Any] | None


class LayerActivation(NamedTuple):
    """An activation, split into a fused and an unfused part.

    Attributes:
        fused: the part that the operator applies.
        after: the function that plain JAX applies to the operator's result, or None.
        negative_slope: that of a leaky ReLU, 0 for others.
    """

    fused: Activation
    after: Callable[..., Any] | None = None
    negative_slope: float = 0.0

    @classmethod
    def of(cls, fused: FusedActivation) -> "LayerActivation":
        return cls(fused.name, negative_slope=fused.negative_slope)

    @property
    def is_fused(self) -> bool:
        """Whether the operator applies all of it, and it is not nothing."""
        return self.after is None and self.fused != "none"

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
        return self.finish(activate(y, self.fused, self.negative_slope))


NONE: Final = LayerActivation("none")


def layer_activation(layer: str, field: str, given: Any) -> LayerActivation:
    """Validates and splits the value that a layer's field was given.

    Raises:
        ValueError: the value is a string that does not name an activation.
        TypeError: the value is a class, or it is not a string, None or a callable.
    """
    if given is None:
        return NONE
    fused = fused_activation(given)
    if fused is not None:
        return LayerActivation.of(fused)
    if isinstance(given, str):
        raise ValueError(
            f"{layer}: {field} must be {names()}, None or a callable, got {given!r}; pass other"
            " activations as functions, such as jax.nn.softplus."
        )
    if isinstance(given, type):
        raise TypeError(
            f"{layer}: {field} must be {names()}, None or a callable, got the class"
            f" {given.__name__}; pass an instance of it."
        )
    if not callable(given):
        raise TypeError(
            f"{layer}: {field} must be {names()}, None or a callable, got"
            f" {described_value(given)} of type {type(given).__name__}."
        )
    return LayerActivation("none", given)
