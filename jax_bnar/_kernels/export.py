"""What `jax.export` must be told about the custom calls."""

from typing import Final

from jax.export import DisabledSafetyCheck

from jax_bnar._kernels import kernel_call, targets

# jax.export refuses custom calls whose stability it does not know. Ours are versioned by name: a
# target keeps its operands and attributes, or gets a new version.
DISABLED_EXPORT_CHECKS: Final = tuple(
    DisabledSafetyCheck.custom_call(targets.target_name(operation.name))
    for operation in kernel_call.OPERATIONS
)
