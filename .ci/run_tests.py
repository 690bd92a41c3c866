"""Runs pytest in the environment in which the tests take the least time: run_tests.py ARGUMENT...

XLA compiles quickly rather than well, and JAX keeps what it compiled, in build/ unless
JAX_COMPILATION_CACHE_DIR says where. XLA_FLAGS that are set stay as they are.
"""

import os
import pathlib
import sys

from jax_cache import jax_cache
from quick_xla_flags import quick_flags

ROOT = pathlib.Path(__file__).parents[1]


def main(arguments: list[str]) -> None:
    environment = dict(os.environ)
    if "XLA_FLAGS" not in environment:
        environment["XLA_FLAGS"] = quick_flags()
    if "JAX_COMPILATION_CACHE_DIR" not in environment:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(jax_cache(ROOT / "build" / "jax_cache"))
    # Programs of any size and time: most of the tests' are small.
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *arguments], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
