"""Choice between the kernels and pure JAX."""

import os
import pathlib
import sys
import warnings
from typing import Literal, cast

from jax_bnar._base import native_module

Implementation = Literal["ffi", "xla"] | None

ENVIRONMENT_VARIABLE = "JAX_BNAR_IMPLEMENTATION"
_NAMES = ("ffi", "xla")
_PACKAGE = str(pathlib.Path(__file__).parents[1])

_warned = False


def resolve_implementation(function: str, implementation: str | None) -> Implementation:
    """The implementation asked for, else the one that the environment sets, else None.

    None takes the kernel where there is one and pure JAX elsewhere. Where there is none because the
    native module did not load, that is worth one warning: the installation is not whole. Whoever
    chose 'xla' gets none.
    """
    if implementation is not None:
        if implementation not in _NAMES:
            raise ValueError(
                f"{function}: implementation must be None, 'ffi' (the kernels) or 'xla' (pure JAX),"
                f" got {implementation!r}."
            )
        return cast(Implementation, implementation)
    chosen = from_environment(function)
    if chosen is None and native_module.load_error is not None:
        _warn_once(native_module.load_error)
    return chosen


def from_environment(function: str) -> Implementation:
    """What JAX_BNAR_IMPLEMENTATION says, None where it is not set."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not value:
        return None
    if value not in _NAMES:
        raise ValueError(
            f"{function}: the environment variable {ENVIRONMENT_VARIABLE} must be unset, 'ffi' or"
            f" 'xla', got {value!r}."
        )
    return cast(Implementation, value)


def _warn_once(load_error: ImportError) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"jax_bnar computes in pure JAX, without its kernels: its native module did not load"
        f" ({load_error}). Install the package with `pip install .` in its sources;"
        f" `python -m jax_bnar.doctor` says what is missing. If pure JAX is what you want,"
        f" {ENVIRONMENT_VARIABLE}=xla says so and silences this warning.",
        RuntimeWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """The stack level, counted from `_warn_once`, of the first frame outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE + os.sep):
        level, frame = level + 1, frame.f_back
    return level
