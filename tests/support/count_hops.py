"""Counts how often a reader has to change files to follow a call.

    python tests/support/count_hops.py

Traces bn_add_relu and its gradient under jit, counts calls of the package's own functions, and
prints how often the next call is in another file.
"""

import itertools
import pathlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import jax_bnar

PACKAGE = str(pathlib.Path(jax_bnar.__file__).parent)


def count(trace: Callable[[], Any]) -> dict[str, int]:
    calls: list[tuple[str, str]] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(follow)
    try:
        trace()
    finally:
        sys.setprofile(None)
    files = [file for file, _ in calls]
    return {
        "calls": len(calls),
        "functions": len(set(calls)),
        "files": len(set(files)),
        "switches": sum(a != b for a, b in itertools.pairwise(files)),
    }


def hops() -> dict[str, dict[str, int]]:
    """What `count` finds for the operator and for its gradient, under jit."""
    x, c = jnp.ones((4, 3, 8), jnp.float32), jnp.ones(8, jnp.float32)

    def forward(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax_bnar.bn_add_relu(x, z, scale, bias).y

    def loss(*given: Any) -> Any:
        return forward(*given).sum()

    functions = {"forward": forward, "grad": jax.grad(loss, (0, 1, 2, 3))}
    return {
        name: count(lambda f=function: jax.jit(f).lower(x, x, c, c))
        for name, function in functions.items()
    }


if __name__ == "__main__":
    for name, numbers in hops().items():
        print(f"{name:8}", numbers)
