"""What belongs to one input of y = act(sum of batch_norm(x) over the inputs + z).

The operator has one input or several. What belongs to its inputs is a tuple with one entry for each
of them: a tuple of arrays for x, and a tuple of the pairs below for vectors. Flattened, these are
the operands of a primitive, in order (`jax_bnar._base.signatures`).
"""

import functools
from typing import Any, Final, NamedTuple

from jax_bnar._base.gates import Gate, recomputes

# The numbers of inputs for which there are kernels, each with the prefix of their names.
PREFIXES: Final = {1: "", 2: "dual_"}


class Affine(NamedTuple):
    """The parameters of an input, or their tangents; None if the input has no such parameter."""

    scale: Any
    bias: Any


class Statistics(NamedTuple):
    """The statistics of an input, or their tangents or cotangents."""

    mean: Any
    var: Any


class Coefficients(NamedTuple):
    """b and k of dx = a*e + b*(x-mean) + k, with a = scale*rstd; each has shape (G, C)."""

    b: Any
    k: Any


@functools.cache
def numbered(name: str, inputs: int) -> tuple[str, ...]:
    """The names of what each input has one of: "x" of the only one, "x1" and so on of several."""
    return (name,) if inputs == 1 else tuple(f"{name}{i + 1}" for i in range(inputs))


def read_by_gate(
    gate: Gate, statistics: tuple[Statistics, ...], affine: tuple[Affine, ...]
) -> tuple[tuple[Statistics, ...], tuple[Affine, ...]]:
    """What `backward_reduce` reads of statistics and parameters."""
    if recomputes(gate):
        return statistics, affine
    means = tuple(Statistics(own.mean, None) for own in statistics)
    return means, tuple(Affine(None, None) for _ in statistics)
