"""Eager PyTorch with the addition and the ReLU in place, as in torchvision's ResNet.

Working in place is legal, because the backward of batch_norm needs its input and that of the ReLU
its output; it saves two new tensors. Parameters and statistics stay float32 with bf16 activations,
as under autocast. Unless the layout is NCHW, operands are in channels_last, in which CPU batch_norm
and convolutions are fastest. All cores of the process are used.
"""

import torch
from torch.nn import functional

from benchmarks.sites.peers import Step, _torch
from benchmarks.sites.problem import EPSILON, MOMENTUM, Problem


def build(problem: Problem) -> Step:
    def forward(
        x: torch.Tensor,
        z: torch.Tensor | None,
        scale: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
    ) -> torch.Tensor:
        y = functional.batch_norm(
            x, running_mean, running_var, scale, bias, True, 1 - MOMENTUM, EPSILON
        )
        if z is not None:
            y = y.add_(z)
        return y if problem.site.form == "batch_norm" else y.relu_()

    return _torch.make_step(problem, forward)
