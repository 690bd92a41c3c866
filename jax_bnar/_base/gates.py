"""Where backward finds the derivative of the activation."""

from typing import Literal

# Nowhere ("none": no activation), in y, in a bit mask, or in x. From x it recomputes the normalised
# value, which is enough if no residual was added; with "z" it reads the residual again as well.
Gate = Literal["none", "x", "y", "mask", "z"]


def recomputes(gate: Gate) -> bool:
    """Whether backward computes the value before the activation again, from all of its operands."""
    return gate in ("x", "z")
