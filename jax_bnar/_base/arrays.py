"""Types of arrays that several rooms name."""

import jax

# An operand that a call may lack: scale, bias, a residual, a mask.
OptionalArray = jax.Array | None
