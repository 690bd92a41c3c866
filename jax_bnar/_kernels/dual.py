"""The custom calls of y = relu(batch_norm(x1) + batch_norm(x2))."""

from typing import Final

from jax_bnar import dual_reference
from jax_bnar._base import signatures
from jax_bnar._kernels.kernel_call import Operation

forward = Operation(signatures.DUAL_FORWARD, dual_reference.forward)
backward = Operation(signatures.DUAL_BACKWARD, dual_reference.backward)
normalise = Operation(signatures.DUAL_NORMALISE, dual_reference.normalise)
backward_reduce = Operation(signatures.DUAL_BACKWARD_REDUCE, dual_reference.backward_reduce)
backward_apply = Operation(signatures.DUAL_BACKWARD_APPLY, dual_reference.backward_apply)

OPERATIONS: Final = (forward, backward, normalise, backward_reduce, backward_apply)
