"""Runs pytest in the environment in which the tests run fastest: run_tests.py ARGUMENT...

XLA_FLAGS make XLA spend little time on optimisation, unless the caller has set them. JAX caches
what it compiles in JAX_COMPILATION_CACHE_DIR, by default a directory in build/.
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
    # Cache programs of any size and compile time, because most of the tests' programs are small.
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *arguments], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
