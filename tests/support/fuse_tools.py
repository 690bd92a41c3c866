"""Checks of fused functions: the operators in them, their results and their gradients."""

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bnar


def operators(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How often `fuse` calls each operator in a function."""
    report = jax_bnar.explain(function)(*args)
    counts = collections.Counter[str]()
    for candidate in report.matched:
        assert candidate.operator is not None
        counts[candidate.operator] += candidate.calls
    return dict(counts)


def kernels(function: Callable[..., Any], *args: Any) -> int:
    """The number of our operators in the jaxpr of a function."""
    text = str(jax.make_jaxpr(function)(*args))
    names = "forward|inference|normalise|statistics"
    return len(re.findall(rf" (bnar_(?:dual_)?(?:{names})|jax_bnar_named)\[", text))


def assert_fused(function: Callable[..., Any], *args: Any, **counts: int) -> None:
    """Asserts that `fuse` uses these operators and does not make results or gradients worse."""
    assert operators(function, *args) == counts
    assert kernels(function, *args) == 0
    assert kernels(jax_bnar.fuse(function), *args) >= 1
    assert_no_worse(function, *args)


def assert_untouched(function: Callable[..., Any], *args: Any, reason: str = "") -> None:
    """Asserts that nothing is fused, for this reason, and that jaxpr and results do not change."""
    report = jax_bnar.explain(function)(*args)
    assert not report.matched, report
    if reason:
        assert any(reason in candidate.reason for candidate in report.refused), report
    fused = jax_bnar.fuse(function)
    assert str(jax.make_jaxpr(fused)(*args)) == str(jax.make_jaxpr(function)(*args))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(fused)(*args), jax.jit(function)(*args))


def assert_no_worse(function: Callable[..., Any], *args: Any) -> None:
    """Asserts that fused values and gradients are as close to float64 as unfused ones.

    Values are compared one by one. Gradients in 16-bit dtypes are compared together, because
    rounding flips gates of the ReLU, and the error of a sum that cancels is a matter of luck.
    """
    both = jax.jit(lambda *args: (function(*args), _gradients(function)(*args)))
    oracle, before = both(*in_float64(args)), both(*args)
    fused = jax_bnar.fuse(function)
    # A function that is not differentiated is another program for us.
    after = jax.jit(fused)(*args), jax.jit(_gradients(fused))(*args)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    _assert_as_close(after[0], before[0], oracle[0], together=False)
    _assert_as_close(after[1], before[1], oracle[1], together=True)


def _assert_as_close(after: Any, before: Any, oracle: Any, *, together: bool) -> None:
    """Asserts that `after` is as close to `oracle` as `before`.

    If `together`, arrays of which some are in 16 bits are compared as a whole.
    """
    errors = []
    short = False
    for given, unfused, exact in zip(*map(jax.tree.leaves, (after, before, oracle)), strict=True):
        assert (given.shape, given.dtype) == (unfused.shape, unfused.dtype)
        scale = _magnitude(exact)
        slack = 8 * float(jnp.finfo(given.dtype).eps) if _is_float(given) else 0.0
        short = short or slack > 1e-4
        errors.append((error(given, exact) / scale, error(unfused, exact) / scale, slack))
    if short and together:
        ours, theirs, slacks = (np.linalg.norm(column) for column in zip(*errors, strict=True))
        errors = [(ours, theirs, slacks)]
    for ours, theirs, slack in errors:
        assert ours <= theirs + slack


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _magnitude(array: Any) -> float:
    return 1 + float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


def error(given: Any, expected: Any) -> float:
    """The largest error; elements that are both NaN or the same infinity count as equal."""
    a, b = np.asarray(given, np.float64), np.asarray(expected, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.abs(np.where(same, 0, a) - np.where(same, 0, b)), initial=0.0))


def in_float64(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        tree,
    )


def _gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of a weighted sum of all results with respect to all floating-point arguments."""

    def loss(*args: Any) -> jax.Array:
        total: Any = 0.0
        for number, leaf in enumerate(jax.tree.leaves(function(*args))):
            weights = np.cos(np.arange(leaf.size) + number).reshape(leaf.shape)
            total = total + jnp.sum(leaf.astype(jnp.float64) * weights)
        return total

    def gradients(*args: Any) -> Any:
        return jax.grad(loss, argnums=tuple(range(len(args))), allow_int=True)(*args)

    return lambda *args: [
        leaf for leaf in jax.tree.leaves(gradients(*args)) if leaf.dtype != jax.dtypes.float0
    ]


def array(shape: tuple[int, ...], seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal numbers around 0.5."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) + 0.5, dtype)
