"""The safety checks of `jax.export` that the custom calls require to be disabled."""

from typing import Final

from jax.export import DisabledSafetyCheck

from jax_bnar._kernels import kernel_call, targets

# jax.export refuses custom calls that it does not know to be stable. Ours are stable because their
# names carry a version: if the operands or attributes of a target change, so does its version.
DISABLED_EXPORT_CHECKS: Final = tuple(
    DisabledSafetyCheck.custom_call(targets.target_name(operation.name))
    for operation in kernel_call.ALL
)
