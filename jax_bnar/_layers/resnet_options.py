"""Options of a ResNet that Linen and NNX share, and the names of its modules in Linen."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from flax import linen as nn
from flax import nnx

from jax_bnar._operators.validation import check_count

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


def choice(
    function: Literal["ResNet", "FusedBottleneck"],
    field: str,
    value: Any,
    choices: Mapping[str, Any],
) -> Any:
    """Looks up the value of a field, with a ValueError for an unknown one."""
    if value not in choices:
        allowed = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{function}: {field} must be {allowed}, got {value!r}.")
    return choices[value]


def check_sizes(stage_sizes: Any, num_classes: Any, num_filters: Any) -> None:
    """Checks the numbers of blocks, classes and channels.

    Raises:
        ValueError, TypeError: one is no positive integer, or there is no stage.
    """
    is_sequence = isinstance(stage_sizes, Iterable) and not isinstance(stage_sizes, str)
    sizes = tuple(stage_sizes) if is_sequence else ()
    if not sizes:
        raise (ValueError if is_sequence else TypeError)(
            "ResNet: stage_sizes must be a sequence with the number of blocks of each stage, such"
            f" as (3, 4, 6, 3), got {stage_sizes!r}."
        )
    for index, size in enumerate(sizes):
        check_count("ResNet", f"stage_sizes[{index}]", size)
    check_count("ResNet", "num_classes", num_classes)
    check_count("ResNet", "num_filters", num_filters)


def check_norm(norm: Any) -> None:
    """Refuses what makes no norm; a module of Linen or NNX can be called, too, but makes none."""
    if not callable(norm) or isinstance(norm, (nn.Module, nnx.Module)):
        kind = f"{type(norm).__module__}.{type(norm).__qualname__}"
        raise TypeError(
            "ResNet: norm must be a class of norms, such as jax_bnar's BatchNorm, or a partial of"
            f" one, got an instance of {kind}; the network makes the norms itself."
        )


def norm_class(norm: Any) -> Any:
    """The class underlying a `functools.partial`, or the class itself."""
    while isinstance(norm, functools.partial):
        norm = norm.func
    return norm


def arguments_of(norm: Any) -> dict[str, Any]:
    """The keyword arguments that a partial, or one of a partial, already has."""
    if not isinstance(norm, functools.partial):
        return {}
    return arguments_of(norm.func) | norm.keywords


def with_defaults(norm: Any, **arguments: Any) -> Any:
    """The norm with what the network gives all of its norms, unless it has arguments of its own."""
    given = arguments_of(norm)
    return functools.partial(norm, **{k: v for k, v in arguments.items() if k not in given})


def require_no_activation(norm: Any) -> None:
    """Refuses a norm with an activation: the block sets it, and a shortcut's norm has none."""
    given = arguments_of(norm)
    if "activation" in given:
        raise ValueError(
            f"FusedBottleneck: norm must leave the activation to the block, got a partial with"
            f" activation={given['activation']!r}; leave it out (ReLU is the default), and pass"
            " another one as act."
        )
