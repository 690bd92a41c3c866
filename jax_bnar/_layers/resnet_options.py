"""Options of a ResNet that Linen and NNX share."""

import functools
from collections.abc import Mapping
from typing import Any, Final, Literal

Padding = Literal["SAME", "torch"]

# The padding of 3x3 windows. With strides 2 and an even size, "SAME" pads at the end only.
PADDINGS: Final[Mapping[str, Any]] = {"SAME": "SAME", "torch": ((1, 1), (1, 1))}


def choice(field: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """Looks up the value of a field, with a ValueError for an unknown one."""
    if value not in choices:
        allowed = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"ResNet: {field} must be {allowed}, got {value!r}.")
    return choices[value]


def norm_class(norm: Any) -> Any:
    """The class underlying a `functools.partial`, or the class itself."""
    while isinstance(norm, functools.partial):
        norm = norm.func
    return norm


def require_no_activation(norm: Any) -> None:
    """Refuses a norm with an activation: the block sets it, and a shortcut's norm has none."""
    while isinstance(norm, functools.partial):
        if "activation" in norm.keywords:
            raise ValueError(
                f"ResNet: norm must leave the activation to the block, got a partial with"
                f" activation={norm.keywords['activation']!r}; leave it out (ReLU is the default),"
                " and pass another one as act to FusedBottleneck."
            )
        norm = norm.func
