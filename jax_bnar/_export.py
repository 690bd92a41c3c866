"""What `jax.export` must be told about the custom calls."""

from typing import Final

from jax.export import DisabledSafetyCheck

from jax_bnar import _native_targets, primitive

# jax.export refuses custom calls whose stability it does not know. Ours are versioned by name: a
# target keeps its operands and attributes, or gets a new version.
DISABLED_EXPORT_CHECKS: Final = tuple(
    DisabledSafetyCheck.custom_call(_native_targets.target_name(operation.name))
    for operation in primitive.OPERATIONS
)
