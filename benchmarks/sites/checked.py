"""The steps of all peers at a site, each compared with the reference before anybody times it."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.sites import peers
from benchmarks.sites.problem import Problem, check_results, expected


class Checked(NamedTuple):
    """The steps of the peers that can be measured, and why the others cannot."""

    steps: dict[str, peers.Step]
    unavailable: dict[str, str]


def build(
    names: Sequence[peers.PeerName], problem: Problem, *, leave_out_inaccurate: bool = False
) -> Checked:
    """Builds each peer's step and runs it once.

    With `leave_out_inaccurate`, another peer than jax_bnar that is outside of the tolerances counts
    as unavailable, with its errors as the reason.

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
        try:
            check_results(name, problem, step.to_results(step.run()), reference)
        except ValueError as wrong:
            if name == "ours" or not leave_out_inaccurate:
                raise
            checked.unavailable[name] = str(wrong)
            continue
        checked.steps[name] = step
    return checked
