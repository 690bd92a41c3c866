"""The static configuration of one operator call, hashable because it is part of trace keys."""

import dataclasses
from typing import Any, Literal

from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import ChannelLayout

Activation = Literal["none", "relu"]
Save = Literal["y", "mask"]
# Where backward finds the sign of the ReLU: nowhere ("none": no activation), in y, in a bit mask,
# or in x. From x it recomputes the normalised value, which is enough if no residual was added.
Gate = Literal["none", "x", "y", "mask"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about one call that is known at trace time.

    Several inputs (`inputs`) are always followed by a ReLU, and no residual is added to them. So
    their primitives do not have the static parameters `activation` and `has_z`.
    """

    epsilon: float
    activation: Activation
    save: Save
    implementation: Implementation
    has_z: bool
    layout: ChannelLayout
    inputs: int = 1

    @property
    def gate(self) -> Gate:
        if self.activation == "none":
            return "none"
        if self.save == "mask":
            return "mask"
        return "y" if self.has_z else "x"

    @property
    def save_mask(self) -> bool:
        return self.gate == "mask"

    @property
    def common_statics(self) -> dict[str, Any]:
        """Static parameters of every primitive."""
        return {"layout": self.layout, "implementation": self.implementation}

    def forward_statics(self, *, save_mask: bool) -> dict[str, Any]:
        """Static parameters of the primitives `forward` and `normalise`."""
        return {**self.inference_statics, "save_mask": save_mask}

    @property
    def inference_statics(self) -> dict[str, Any]:
        """Static parameters of the primitive `inference`."""
        activation = {"activation": self.activation} if self.inputs == 1 else {}
        return {**self.common_statics, "epsilon": self.epsilon, **activation}

    def apply_statics(self, gate: Gate) -> dict[str, Any]:
        """Static parameters of the primitive `backward_apply`."""
        return {**self.common_statics, "epsilon": self.epsilon, "gate": gate}

    def backward_statics(self, gate: Gate) -> dict[str, Any]:
        """Static parameters of the primitives `backward` and `backward_reduce`."""
        has_z = {"has_z": self.has_z} if self.inputs == 1 else {}
        return {**self.apply_statics(gate), **has_z}
