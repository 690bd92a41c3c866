"""Sums of more than two normalised arrays, as in the blocks of RepVGG and MobileOne.

`act(n1 + n2 + n3)` is found as `act(n1 + z)` with two residuals, which XLA would have to store and
add first. Instead, the norm that is added last has the activation, and takes the sum of those
before it as its residual; of these, the last one does the same.
"""

import dataclasses
from collections.abc import Sequence

from jax_bnar._fuse.dual import alone
from jax_bnar._fuse.tail import Tail
from jax_bnar._fuse.training_match import TrainingMatch


def chains(
    matches: Sequence[TrainingMatch],
) -> list[list[tuple[TrainingMatch, TrainingMatch]]]:
    """For each sum of several norms, its matches, each with the one that takes its place."""
    added = alone(matches)
    found = []
    for first in matches:
        replaced = []
        tail = first.tail
        while len(tail.residuals) > 1 and (last := added.get(tail.residuals[-1])) is not None:
            before = Tail(tail.sums[-2], tail.residuals[:-1], sums=tail.sums[:-1])
            own = dataclasses.replace(tail, residuals=(before.result,), sums=tail.sums[-1:])
            replaced.append((last, dataclasses.replace(last, tail=own)))
            tail = before
        if replaced:
            found.append([(first, dataclasses.replace(first, tail=tail)), *replaced])
    return found
