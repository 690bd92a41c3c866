"""Choice between the kernels and pure JAX."""

import os
from typing import Literal, cast

Implementation = Literal["ffi", "xla"] | None

ENVIRONMENT_VARIABLE = "JAX_BNAR_IMPLEMENTATION"
_NAMES = ("ffi", "xla")


def resolve_implementation(function: str, implementation: str | None) -> Implementation:
    """The implementation asked for, else the one that the environment sets, else None.

    None takes the kernel where there is one and pure JAX elsewhere.
    """
    if implementation is not None:
        if implementation not in _NAMES:
            raise ValueError(
                f"{function}: implementation must be None, 'ffi' (the kernels) or 'xla' (pure JAX),"
                f" got {implementation!r}."
            )
        return cast(Implementation, implementation)
    from_environment = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not from_environment:
        return None
    if from_environment not in _NAMES:
        raise ValueError(
            f"{function}: the environment variable {ENVIRONMENT_VARIABLE} must be unset, 'ffi' or"
            f" 'xla', got {from_environment!r}."
        )
    return cast(Implementation, from_environment)
