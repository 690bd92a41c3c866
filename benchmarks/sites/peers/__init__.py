"""The peers: each computes the same training step the way its users would write it.

One step computes y, the new running statistics, dx, [dz], dscale and dbias from x, [z], scale,
bias, running statistics and dy.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

from benchmarks.sites.problem import Problem, Results

PeerName = Literal["ours", "ours_mask", "flax", "torch", "torch_compile"]


@dataclass(frozen=True)
class Step:
    """A step bound to its operands.

    Attributes:
        run: computes all results, waits for them and returns them.
        forward: computes only y and the new running statistics, and waits for them.
        to_results: converts what the first `run` returned, for comparison.
    """

    run: Callable[[], Any]
    forward: Callable[[], Any]
    to_results: Callable[[Any], Results]


class PeerModule(Protocol):
    def build(self, problem: Problem) -> Step: ...


# Peers are imported when they are used, so that a missing package affects only the peer it is for.
_MODULES: Final[dict[PeerName, str]] = {
    "ours": "benchmarks.sites.peers.ours",
    "ours_mask": "benchmarks.sites.peers.ours_mask",
    "flax": "benchmarks.sites.peers.flax_linen",
    "torch": "benchmarks.sites.peers.torch_eager",
    "torch_compile": "benchmarks.sites.peers.torch_compiled",
}


def build(name: PeerName, problem: Problem) -> Step:
    return cast(PeerModule, importlib.import_module(_MODULES[name])).build(problem)
