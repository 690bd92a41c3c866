"""The peers: each computes the same training step the way its users would write it.

One step computes y, the new running statistics, dx, [dz], dscale and dbias from x, [z], scale,
bias, running statistics and dy.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, cast

from benchmarks.sites.problem import Problem, Results

PeerName = Literal[
    "ours",
    "ours_mask",
    "flax",
    "torch",
    "torch_compile",
    "onednn",
    "onednn_blocked",
    "paddle",
    "tensorflow",
    "keras",
]


@dataclass(frozen=True)
class Step:
    """A step bound to its operands.

    Attributes:
        run: computes all results, waits for them and returns them.
        forward: computes only y and the new running statistics, and waits for them.
        to_results: converts what the first `run` returned, for comparison.
        details: what the peer says of the code that runs, by name; for the results.
    """

    run: Callable[[], Any]
    forward: Callable[[], Any]
    to_results: Callable[[Any], Results]
    details: Mapping[str, str] = field(default_factory=dict)


class UnavailableError(Exception):
    """A peer cannot be measured here: the message says why and, if there is one, the way out.

    Other errors, wrong results among them, are bugs, and end the run.
    """


class PeerModule(Protocol):
    def build(self, problem: Problem) -> Step: ...


# Peers are imported when they are used, so that a missing package affects only the peer it is for.
# They are in the order in which they can be imported, see `paddle_eager`.
_MODULES: Final[dict[PeerName, str]] = {
    "ours": "benchmarks.sites.peers.ours",
    "ours_mask": "benchmarks.sites.peers.ours_mask",
    "flax": "benchmarks.sites.peers.flax_linen",
    "torch": "benchmarks.sites.peers.torch_eager",
    "torch_compile": "benchmarks.sites.peers.torch_compiled",
    "onednn": "benchmarks.sites.peers.onednn",
    "onednn_blocked": "benchmarks.sites.peers.onednn_blocked",
    "paddle": "benchmarks.sites.peers.paddle_eager",
    "tensorflow": "benchmarks.sites.peers.tensorflow_graph",
    "keras": "benchmarks.sites.peers.keras_on_tensorflow",
}
# The peers that take activations in NCHW, too. PyTorch calls these contiguous.
_WITH_CHANNELS_FIRST: Final[frozenset[PeerName]] = frozenset(
    {"ours", "ours_mask", "flax", "torch", "torch_compile", "onednn"}
)
# The packages that bring the modules which peers import.
_DISTRIBUTIONS: Final = {
    "flax": "flax",
    "torch": "torch",
    "tensorflow": "tensorflow-cpu",
    "keras": "keras",
    "paddle": "paddlepaddle",
}


def in_order(names: Iterable[PeerName]) -> list[PeerName]:
    """The peers in the order in which they can be built in one process."""
    return sorted(names, key=list(_MODULES).index)


def build(name: PeerName, problem: Problem) -> Step:
    """The peer's step.

    Raises:
        UnavailableError: a package is missing or does not load, or the peer does not have the dtype
            or the layout here.
    """
    if problem.layout == "NCHW" and name not in _WITH_CHANNELS_FIRST:
        raise UnavailableError("this peer takes NHWC alone")
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("benchmarks", "jax_bnar"):
            raise
        raise UnavailableError(_why_not_imported(error, package)) from error
    return cast(PeerModule, module).build(problem)


def _why_not_imported(error: ImportError, package: str) -> str:
    if isinstance(error, ModuleNotFoundError) and package in _DISTRIBUTIONS:
        return f"{package} is not installed; pip install {_DISTRIBUTIONS[package]}"
    return f"an import failed: {error}"
