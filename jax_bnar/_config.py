"""Static configuration of one operator call, hashable so that it can key a trace."""

import dataclasses
from typing import Literal

from jax_bnar._implementation import Implementation

Activation = Literal["none", "relu"]
Save = Literal["y", "mask"]
# Where backward finds the sign of the ReLU: nowhere (no activation), in y, or in a bit mask.
Gate = Literal["none", "y", "mask"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is known at trace time about one call on canonical (G, N, C, S) arrays."""

    epsilon: float
    activation: Activation
    save: Save
    implementation: Implementation
    has_residual: bool
    has_bias: bool

    @property
    def gate(self) -> Gate:
        return "none" if self.activation == "none" else self.save

    @property
    def save_mask(self) -> bool:
        return self.gate == "mask"
