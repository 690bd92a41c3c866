"""The choice between the kernels and pure JAX."""

import os
import pathlib
import sys
import warnings
from typing import Literal, cast

from jax_bnar._base import installation, native_module

Implementation = Literal["ffi", "xla"] | None
# What computes an operation when it is lowered; "pinned" is pure JAX on a GPU, beside custom calls.
Computation = Literal["ffi", "xla", "pinned"] | None

ENVIRONMENT_VARIABLE = "JAX_BNAR_IMPLEMENTATION"
_NAMES = ("ffi", "xla")
# Between the user's line and a warning there are frames of these packages.
_PACKAGES = ("jax_bnar", "jax", "flax", "haiku", "equinox")

_warned = False


def resolve_implementation(function: str, implementation: str | None) -> Implementation:
    """The implementation that the call asks for, or else the environment, or else None.

    None uses the kernel where there is one and pure JAX elsewhere. If there is no kernel because
    the native module did not load, the installation is broken, so the user is warned once. Choosing
    'xla' silences the warning.
    """
    if implementation is not None:
        if not isinstance(implementation, str) or implementation not in _NAMES:
            raise ValueError(
                f"{function}: implementation must be None, 'ffi' (the kernels) or 'xla' (pure JAX),"
                f" got {implementation!r}."
            )
        return cast(Implementation, implementation)
    chosen = from_environment(function)
    if chosen is None and native_module.load_error is not None:
        warn_once("its kernels", *installation.why_no_native_module(native_module.load_error))
    elif chosen is None and native_module.cuda_load_error is not None:
        warn_once(
            "its CUDA kernels", *installation.why_no_cuda_module(native_module.cuda_load_error)
        )
    return chosen


def from_environment(function: str) -> Implementation:
    """The value of JAX_BNAR_IMPLEMENTATION, or None if it is not set."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not value:
        return None
    if value not in _NAMES:
        raise ValueError(
            f"{function}: the environment variable {ENVIRONMENT_VARIABLE} must be unset, 'ffi' or"
            f" 'xla', got {value!r}."
        )
    return cast(Implementation, value)


def warn_once(missing: str, reason: str, way_out: str) -> None:
    """Warns, the first time, that the operators fall back to pure JAX without `missing`."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"jax_bnar falls back to pure JAX, without {missing}, because {reason}. Way out: {way_out}."
        " `python -m jax_bnar.doctor` says what is missing. If you want pure JAX, set"
        f" {ENVIRONMENT_VARIABLE}=xla to silence this warning.",
        RuntimeWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """The stack level, counted from `warn_once`, of the first frame outside `_PACKAGES`."""
    loaded = (getattr(sys.modules.get(name), "__file__", None) for name in _PACKAGES)
    folders = tuple(str(pathlib.Path(file).parent) + os.sep for file in loaded if file)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        level, frame = level + 1, frame.f_back
    return level
