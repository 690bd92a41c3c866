"""Shared by the PyTorch peers: operands in the layout, backward, results back as NHWC."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common.environment import core_count
from benchmarks.sites.peers import Step
from benchmarks.sites.problem import RUNNING_MEAN, RUNNING_VAR, Problem, Results, biased_running_var

Forward = Callable[..., torch.Tensor]


def isa() -> str:
    """The instruction set of PyTorch's own kernels."""
    return torch.backends.cpu.get_cpu_capability()


def _activation(values: np.ndarray, problem: Problem) -> torch.Tensor:
    """A logical NCHW tensor in memory that torch owns, in channels_last format for NHWC."""
    stored = torch.tensor(problem.in_layout(values), dtype=getattr(torch, problem.dtype))
    return stored.permute(0, 3, 1, 2) if problem.layout == "NHWC" else stored


def _to_numpy(values: torch.Tensor) -> np.ndarray:
    values = values.detach().to(torch.float32)
    return (values.permute(0, 2, 3, 1) if values.ndim == 4 else values).numpy().copy()


def make_step(problem: Problem, forward: Forward) -> Step:
    """A step of `forward(x, z, scale, bias, running_mean, running_var)` and autograd's backward."""
    torch.set_num_threads(core_count())
    x = _activation(problem.x, problem).requires_grad_()
    z = None if problem.z is None else _activation(problem.z, problem).requires_grad_()
    dy = _activation(problem.dy, problem)
    scale = torch.tensor(problem.scale).requires_grad_()
    bias = torch.tensor(problem.bias).requires_grad_()
    running_mean = torch.full_like(bias, RUNNING_MEAN, requires_grad=False)
    running_var = torch.full_like(bias, RUNNING_VAR, requires_grad=False)
    inputs = [operand for operand in (x, z, scale, bias) if operand is not None]

    def run() -> Any:
        y = forward(x, z, scale, bias, running_mean, running_var)
        return y, torch.autograd.grad(y, inputs, dy)

    def run_forward() -> Any:
        with torch.no_grad():
            return forward(x, z, scale, bias, running_mean, running_var)

    def to_results(outputs: Any) -> Results:
        y, gradients = outputs
        dx, *dz, dscale, dbias = gradients
        return Results(
            _to_numpy(y),
            _to_numpy(running_mean),
            biased_running_var(_to_numpy(running_var), problem),
            _to_numpy(dx),
            _to_numpy(dz[0]) if dz else None,
            _to_numpy(dscale),
            _to_numpy(dbias),
        )

    return Step(run, run_forward, to_results)
