"""oneDNN itself, called through its C API, on activations in NHWC as a JAX program has them."""

from benchmarks.sites.peers import Step, _onednn
from benchmarks.sites.peers._onednn_plan import NHWC
from benchmarks.sites.problem import Problem


def build(problem: Problem) -> Step:
    return _onednn.make_step(problem, (NHWC,))
