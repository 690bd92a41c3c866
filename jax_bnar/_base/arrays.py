"""Array types used across the package."""

import jax

# An operand that a call may omit: scale, bias, a residual or a mask.
OptionalArray = jax.Array | None
