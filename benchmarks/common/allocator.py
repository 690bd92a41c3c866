"""Which malloc a process uses, and the variables that configure it."""

import ctypes
import os
from typing import Any


def configures_malloc(variable: str) -> bool:
    """Whether an environment variable configures glibc's malloc, or jemalloc."""
    return variable.startswith("MALLOC_") or variable == "GLIBC_TUNABLES"


def describe_allocator() -> dict[str, Any]:
    """The malloc that the process actually uses, and how it was configured."""
    conf = os.environ.get("MALLOC_CONF")
    if hasattr(ctypes.CDLL(None), "mallctl"):
        return {"name": "jemalloc", "malloc_conf": conf}
    # MALLOC_CONF is jemalloc's.
    of_glibc = {
        name: value
        for name, value in os.environ.items()
        if configures_malloc(name) and name != "MALLOC_CONF"
    }
    described = {"name": "default", "malloc_conf": None}
    return described | ({"glibc": of_glibc} if of_glibc else {})
