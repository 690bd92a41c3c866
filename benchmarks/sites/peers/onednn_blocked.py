"""oneDNN in its own layout of blocks of 16 or 8 channels, for which it has its best code.

The operands are in that layout already: a program in which oneDNN computes the convolutions, too,
reorders them only at its ends.
"""

from benchmarks.sites.peers import Step, _onednn
from benchmarks.sites.peers._onednn_plan import BLOCKED
from benchmarks.sites.problem import Problem


def build(problem: Problem) -> Step:
    return _onednn.make_step(problem, BLOCKED)
