"""Which programs for a GPU another machine will run, and so whether they call the kernels."""

from typing import Any

from jax_bnar._base import jax_compat
from jax_bnar._base.implementation import Implementation
from jax_bnar._kernels import cuda_driver, targets


def runs_elsewhere(ctx: Any) -> bool:
    """Whether this machine cannot run the program that is being lowered for CUDA.

    It cannot if the program is for the devices of a topology (`jax.experimental.topologies`), or if
    there is no NVIDIA driver or no GPU here. Whether another machine can load the kernels is not
    known here.
    """
    here = jax_compat.has_gpu_of_program(ctx)
    return not (cuda_driver.devices() if here is None else here)


def calls_kernel(operation: str, ctx: Any, implementation: Implementation) -> bool:
    """Whether a program that another machine will run calls the CUDA kernel.

    An exported program may be meant for any machine, so it calls kernels that this installation
    lacks only if it is told to.
    """
    here = (operation, "cuda") in targets.kernels
    return here or implementation == "ffi" or not jax_compat.is_for_export(ctx)
