"""The static configuration of one operator call, hashable because it is part of trace keys."""

import dataclasses
from typing import Any, Literal

import numpy as np

from jax_bnar._base.activations import Activation, follows_from_y, statics_of
from jax_bnar._base.gates import Gate
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import ChannelLayout

Save = Literal["y", "mask"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about one call that is known at trace time, but for named axes and their groups.

    Calls with several inputs (`inputs`) have no residual, so their primitives lack the static
    parameter `has_z`. `negative_slope` is that of a leaky ReLU, and 0 otherwise. `out_dtype` is the
    dtype of y and z, or None if it is that of x.
    """

    epsilon: float
    activation: Activation
    save: Save
    implementation: Implementation
    has_z: bool
    layout: ChannelLayout
    inputs: int = 1
    negative_slope: float = 0.0
    out_dtype: np.dtype | None = None

    @property
    def gate(self) -> Gate:
        """Where backward of the training form finds the derivative of the activation.

        Of one input without a residual, x tells it, and is read anyway: a mask would cost memory,
        and 4 to 11 % more time on an H200. Of two inputs, whose constants take twice the registers,
        a mask costs no time, and on CPUs it saves some.
        """
        if self.activation == "none":
            return "none"
        keeps = self.has_z or (self.inputs > 1 and self.save == "mask")
        return self.save if keeps and follows_from_y(self.activation) else self._recomputing_gate

    @property
    def inference_gate(self) -> Gate:
        """The gate if mean and var are given.

        Where the derivative jumps, gate "x" would be wrong if only one of forward and backward is a
        kernel: their `a` may differ in the last bit, and so might the side of the jump.
        """
        if self.activation == "none":
            return "none"
        return "y" if follows_from_y(self.activation) else self._recomputing_gate

    @property
    def _recomputing_gate(self) -> Gate:
        return "z" if self.has_z else "x"

    @property
    def activation_statics(self) -> dict[str, Any]:
        return statics_of(self.activation, self.negative_slope)

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
        out_dtype = {} if self.out_dtype is None else {"out_dtype": self.out_dtype}
        return {**self._arithmetic_statics, **out_dtype}

    @property
    def _arithmetic_statics(self) -> dict[str, Any]:
        return {**self.common_statics, "epsilon": self.epsilon, **self.activation_statics}

    def apply_statics(self, gate: Gate) -> dict[str, Any]:
        """Static parameters of the primitive `backward_apply`."""
        return {**self._arithmetic_statics, "gate": gate}

    def backward_statics(self, gate: Gate) -> dict[str, Any]:
        """Static parameters of the primitives `backward` and `backward_reduce`."""
        has_z = {"has_z": self.has_z and not self.dz_is_dy} if self.inputs == 1 else {}
        return {**self.apply_statics(gate), **has_z}

    @property
    def dz_is_dy(self) -> bool:
        """Whether z has the cotangent of y, which backward need not write again."""
        return self.has_z and self.activation == "none"
