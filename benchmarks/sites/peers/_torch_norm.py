"""Forward and backward of a norm and an activation in eager PyTorch."""

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.common.environment import core_count


def step(
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    memory_format: torch.memory_format,
    dtype: str,
    *operands: np.ndarray,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that returns y, dx, dscale and dbias.

    Args:
        function: of x, scale and bias.
        memory_format: of x and dy.
        dtype: of x and dy.
        operands: x, dy, scale and bias, whose channels come last.
    """
    torch.set_num_threads(core_count())
    x, dy, scale, bias = operands

    def tensor(values: np.ndarray) -> torch.Tensor:
        made = torch.tensor(np.moveaxis(values, -1, 1), dtype=getattr(torch, dtype))
        return made.contiguous(memory_format=memory_format)

    own_x, own_dy = tensor(x).requires_grad_(), tensor(dy)
    own_scale, own_bias = (torch.tensor(values).requires_grad_() for values in (scale, bias))

    def run() -> tuple[torch.Tensor, ...]:
        y = function(own_x, own_scale, own_bias)
        return y, *torch.autograd.grad(y, [own_x, own_scale, own_bias], own_dy)

    return run
