"""Eager PyTorch, channels_last, with an activation in place after the norm.

The result of the norm is nobody else's, so its memory may be that of y: autograd of the activation
keeps a copy only where it needs one.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from benchmarks.sites.peers import _torch_norm
from benchmarks.sites.problem import EPSILON

_FUNCTIONS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "silu": functional.silu,
    "hard_silu": functional.hardswish,
    "leaky_relu": functional.leaky_relu,
    "relu6": functional.relu6,
    "gelu": functools.partial(functional.gelu, approximate="tanh"),
    "elu": functional.elu,
    "exact_gelu": functional.gelu,
    "mish": functional.mish,
}
# Those whose derivative follows from y. Others need what they are given, so autograd would refuse
# to have it changed.
_IN_PLACE: Final = frozenset(["leaky_relu", "relu6", "elu"])


def step(activation: str, dtype: str, *operands: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that returns y, dx, dscale and dbias."""
    act = _FUNCTIONS[activation]
    in_place = {"inplace": True} if activation in _IN_PLACE else {}

    def function(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return act(
            functional.batch_norm(x, None, None, scale, bias, True, 0.1, EPSILON), **in_place
        )

    return _torch_norm.step(function, torch.channels_last, dtype, *operands)
