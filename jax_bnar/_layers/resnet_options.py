"""Options of a ResNet that Linen and NNX share, and the names of its modules in Linen."""

import functools
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

Padding = Literal["SAME", "torch"]
Naming = Literal["flax", "algoperf"]

# The padding of 3x3 windows. With strides 2 and an even size, "SAME" pads at the end only.
PADDINGS: Final[Mapping[str, Any]] = {"SAME": "SAME", "torch": ((1, 1), (1, 1))}


class ModuleNames(NamedTuple):
    """The names of the modules that Linen does not number by itself."""

    stem_conv: str
    stem_norm: str
    shortcut_conv: str
    shortcut_norm: str


NAMES: Final[Mapping[str, ModuleNames]] = {
    "flax": ModuleNames("conv_init", "bn_init", "conv_proj", "norm_proj"),
    "algoperf": ModuleNames("Conv_init", "BatchNorm_init", "Conv_proj", "BatchNorm_proj"),
}


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
