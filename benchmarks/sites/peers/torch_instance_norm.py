"""Eager PyTorch's InstanceNorm with the channels first, and a leaky ReLU in place after it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.sites.peers import _torch_norm
from benchmarks.sites.problem import EPSILON


def step(
    negative_slope: float, dtype: str, *operands: Any
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that returns y, dx, dscale and dbias."""

    def function(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = functional.instance_norm(x, weight=scale, bias=bias, use_input_stats=True, eps=EPSILON)
        return functional.leaky_relu_(y, negative_slope) if negative_slope else functional.relu_(y)

    return _torch_norm.step(function, torch.contiguous_format, dtype, *operands)
