"""How many steps a training has, and after which of them the network is evaluated."""

import itertools
import math


def whole_steps(steps: float) -> int:
    """A fractional number of steps, rounded up; errors of the arithmetic do not count."""
    return math.ceil(round(steps, 6))


def evaluation_steps(interval: float, total_steps: int) -> frozenset[int]:
    """The steps after which the network is evaluated: every `interval` steps, and the last.

    An interval of whole epochs is seldom a whole number of steps. Each evaluation follows the step
    that completes its interval, so that the last epoch ends with the last step and not before it.
    """
    interval = max(1.0, interval)
    multiples = (index * interval for index in itertools.count(1))
    before_the_end = itertools.takewhile(lambda steps: steps < total_steps, multiples)
    return frozenset([*map(whole_steps, before_the_end), total_steps])
