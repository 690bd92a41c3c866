"""PyTorch under torch.compile (Inductor), channels_last unless the layout is NCHW.

It needs a C++ compiler at run time, and is not a default peer, because compiling takes a while at
each site.
"""

import os
import shutil
import sys

import torch
from torch.nn import functional

from benchmarks.sites.peers import Step, UnavailableError, _torch
from benchmarks.sites.problem import EPSILON, MOMENTUM, Problem


def build(problem: Problem) -> Step:
    # The compiler that Inductor calls unless its configuration names another.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UnavailableError(
            f"torch.compile needs a C++ compiler, and there is no {compiler}; install one, or name"
            " another in CXX"
        )
    torch.compiler.reset()  # otherwise it stops compiling a function after a few shapes

    @torch.compile(dynamic=False, fullgraph=True)
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
            y = y + z
        return y if problem.site.form == "batch_norm" else functional.relu(y)

    return _torch.make_step(problem, forward)
