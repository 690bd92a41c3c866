"""Eager PyTorch's InstanceNorm with the channels first, and a leaky ReLU in place after it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.common.environment import core_count
from benchmarks.sites.problem import EPSILON


def step(
    negative_slope: float, dtype: str, x: Any, dy: Any, scale: Any, bias: Any
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that returns y, dx, dscale and dbias, from arrays whose channels come last."""
    torch.set_num_threads(core_count())

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.moveaxis(values, -1, 1).copy(), dtype=getattr(torch, dtype))

    own_x, own_dy = tensor(x).requires_grad_(), tensor(dy)
    own_scale, own_bias = (torch.tensor(values).requires_grad_() for values in (scale, bias))

    def run() -> tuple[torch.Tensor, ...]:
        y = functional.instance_norm(
            own_x, weight=own_scale, bias=own_bias, use_input_stats=True, eps=EPSILON
        )
        y = functional.leaky_relu_(y, negative_slope) if negative_slope else functional.relu_(y)
        return y, *torch.autograd.grad(y, [own_x, own_scale, own_bias], own_dy)

    return run
