"""Variables that the CUDA kernels read, for a part of a process."""

import contextlib
import os
from collections.abc import Iterator

from jax_bnar._kernels import targets


@contextlib.contextmanager
def cuda_settings(**variables: str) -> Iterator[None]:
    """Sets variables `JAX_BNAR_CUDA_...` for what is launched inside; wait for results there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    targets.forget_cuda_settings()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        targets.forget_cuda_settings()
