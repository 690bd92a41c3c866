"""What is known of one value of a region: `Term`."""

import dataclasses

from jax_bnar._fuse.axes import Labels
from jax_bnar._fuse.polynomial import Polynomial


@dataclasses.dataclass(frozen=True)
class Term:
    """A value of the region: one polynomial, or several that are stacked along an axis."""

    polynomials: tuple[Polynomial, ...]
    labels: Labels

    @property
    def polynomial(self) -> Polynomial | None:
        return self.polynomials[0] if len(self.polynomials) == 1 else None
