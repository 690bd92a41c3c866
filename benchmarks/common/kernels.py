"""Fails if the kernels are missing, so that pure JAX is never timed by mistake."""

from typing import Any

import jax

from jax_bnar._base import installation
from jax_bnar._base.native_module import load_error, native
from jax_bnar._kernels import targets


def why_no_kernels() -> str | None:
    """Why the default platform has no kernels and how to get them; None if it has them."""
    platform = targets.mlir_platform(jax.default_backend())
    if targets.has_kernel("forward", platform):
        return None
    if targets.load_error is not None:
        reason, way_out = installation.why_no_native_module(targets.load_error)
        if installation.shadowed_package() is not None:
            # Benchmarks are imported from the checkout, so they must run in it.
            way_out = "install the checkout itself with `pip install -e '.[bench]'`"
        return f"{reason}; {way_out}"
    return targets.why_no_kernel("forward", [platform])


def require_kernels() -> None:
    """Raises SystemExit with the reason and the way out if the default platform has no kernels."""
    reason = why_no_kernels()
    if reason is not None:
        raise SystemExit(f"jax_bnar would run in pure JAX here: {reason}.")


def planner() -> Any:
    """The native module, which contains the planner of the CUDA kernels on every platform.

    Raises:
        SystemExit: this installation has no native module.
    """
    if load_error is not None:
        reason, way_out = installation.why_no_native_module(load_error)
        raise SystemExit(f"The planner is in the native module, but {reason}; {way_out}.")
    return native
