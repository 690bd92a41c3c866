"""A plugin of pytest under which `jax.jit(f)` means `jax.jit(fuse(f))`, with every body rebuilt.

Foreign test suites run under it: `python -m pytest -p fuse_everything batch_norm_test.py`.
"""

import functools
from typing import Any

import jax

import jax_bnar
from jax_bnar._fuse.plan import Plan

_jit = jax.jit
calls = 0


@functools.wraps(jax.jit)
def _fusing_jit(fun: Any = None, **options: Any) -> Any:
    if fun is None:
        return lambda fun: _fusing_jit(fun, **options)

    @functools.wraps(fun)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return jax_bnar.fuse(fun)(*args, **kwargs)

    return _jit(counted, **options)


def pytest_configure() -> None:
    Plan.changes = property(lambda self: True)  # type: ignore[assignment]
    jax.jit = _fusing_jit


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{calls} functions fused")
