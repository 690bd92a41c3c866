"""oneDNN itself, called through its C API, on activations in the layout of the JAX program."""

from benchmarks.sites.peers import Step, _onednn
from benchmarks.sites.peers._onednn_plan import NCHW, NHWC
from benchmarks.sites.problem import Problem


def build(problem: Problem) -> Step:
    return _onednn.make_step(problem, (NCHW if problem.layout == "NCHW" else NHWC,))
