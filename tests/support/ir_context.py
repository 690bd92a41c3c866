"""One MLIR context for all programs that a test process lowers.

JAX makes a context for each program and loads all dialects into it, which takes 3 ms and a tenth of
the tests' time. What MLIR keeps in a context is immutable, so programs can share one.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from jax.interpreters import mlir


def share_one() -> Callable[[], None]:
    """Makes JAX use one context. Returns a function with which it begins another one."""
    # What JAX itself calls is not the public name, but the global of the module behind it.
    private: Any = sys.modules[mlir.ModuleContext.__module__]
    shared = functools.cache(private.make_ir_context)
    private.make_ir_context = shared
    return shared.cache_clear
