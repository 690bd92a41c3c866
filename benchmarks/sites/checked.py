"""The steps of all peers at a site, each compared with the reference before anybody times it."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.sites import peers
from benchmarks.sites.problem import Problem, check_results, expected


class Checked(NamedTuple):
    """The steps of the peers that can be measured, and why the others cannot."""

    steps: dict[str, peers.Step]
    unavailable: dict[str, str]


def build(names: Sequence[peers.PeerName], problem: Problem) -> Checked:
    """Builds each peer's step and runs it once.

    Raises:
        ValueError: a peer computes something else. A peer that is only unavailable is named in the
            result, so that the others are measured.
    """
    reference = expected(problem)
    checked = Checked({}, {})
    for name in peers.in_order(names):
        try:
            step = peers.build(name, problem)
        except peers.UnavailableError as why:
            checked.unavailable[name] = str(why)
            continue
        check_results(name, problem, step.to_results(step.run()), reference)
        checked.steps[name] = step
    return checked
