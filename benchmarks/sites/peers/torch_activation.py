"""Eager PyTorch, channels_last, with an activation in place after the norm.

The result of the norm is nobody else's, so its memory may be that of y: autograd of the activation
keeps a copy only where it needs one.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from benchmarks.common.environment import core_count
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


def step(
    activation: str, dtype: str, x: Any, dy: Any, scale: Any, bias: Any
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that returns y, dx, dscale and dbias."""
    torch.set_num_threads(core_count())
    act = _FUNCTIONS[activation]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=getattr(torch, dtype)).permute(0, 3, 1, 2)

    own_x, own_dy = tensor(x).requires_grad_(), tensor(dy)
    own_scale, own_bias = (torch.tensor(values).requires_grad_() for values in (scale, bias))

    def run() -> tuple[torch.Tensor, ...]:
        normalised = functional.batch_norm(
            own_x, None, None, own_scale, own_bias, True, 0.1, EPSILON
        )
        y = act(normalised, inplace=True) if activation in _IN_PLACE else act(normalised)
        return y, *torch.autograd.grad(y, [own_x, own_scale, own_bias], own_dy)

    return run
