"""Sums of norms: in pairs, and in chains of pairs and residuals, as in RepVGG and MobileOne."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fuse_operands import BIAS, SCALE, X, Z, batch_norm, moments, normalise
from fuse_tools import assert_fused, operators

import jax_bnar
from jax_bnar._fuse import find

relu = jax.nn.relu


def _norms(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, ...]:
    """Four norms of arrays of one dtype, in the order in which a program computes them."""

    def norm(array: jax.Array, *affine: jax.Array) -> jax.Array:
        return batch_norm(array.astype(scale.dtype), *affine).astype(x.dtype)

    return (
        norm(x, scale, bias),
        norm(z, bias, scale),
        norm(jnp.sin(x), scale, bias),
        norm(jnp.cos(z), bias, scale),
    )


SUMS: dict[str, tuple[Any, dict[str, int]]] = {
    "a pair": (lambda a, b, c, d: a + b, {"dual_bn_act": 1}),
    "a pair before ReLU": (lambda a, b, c, d: relu(a + b), {"dual_bn_add_relu": 1}),
    "a pair before another layer": (lambda a, b, c, d: 2 * (b + a), {"dual_bn_act": 1}),
    "three": (lambda a, b, c, d: relu(a + b + c), {"dual_bn_act": 1, "bn_add_relu": 1}),
    "three without an activation": (
        lambda a, b, c, d: a + b + c,
        {"dual_bn_act": 1, "bn_act": 1},
    ),
    "three, the pair last": (
        lambda a, b, c, d: relu(a + (b + c)),
        {"dual_bn_act": 1, "bn_add_relu": 1},
    ),
    "three, the pair first": (
        lambda a, b, c, d: relu((b + c) + a),
        {"dual_bn_act": 1, "bn_add_relu": 1},
    ),
    "four": (
        lambda a, b, c, d: relu(a + b + c + d),
        {"dual_bn_act": 1, "bn_act": 1, "bn_add_relu": 1},
    ),
    "four, the first last": (
        lambda a, b, c, d: relu(b + c + d + a),
        {"dual_bn_act": 1, "bn_act": 1, "bn_add_relu": 1},
    ),
    "SiLU": (lambda a, b, c, d: jax.nn.silu(a + b + c), {"dual_bn_act": 1, "bn_act": 1}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, dtype: str) -> None:
    sum_of, counts = SUMS[name]

    def program(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        return sum_of(*_norms(x, z, scale, bias))

    assert_fused(program, X.astype(dtype), Z.astype(dtype), SCALE, BIAS, **counts)


def test_statistics_of_a_chain() -> None:
    """Each call gives those of its own arrays."""

    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        arrays = x, z, jnp.sin(x)
        statistics = [moments(array) for array in arrays]
        a, b, c = (
            normalise(array, *own, scale, bias)
            for array, own in zip(arrays, statistics, strict=True)
        )
        return relu(a + b + c), statistics

    assert_fused(program, X, Z, SCALE, BIAS, dual_bn_act=1, bn_add_relu=1)


def test_a_residual_that_is_no_norm_is_added_first() -> None:
    """The norm that is added last has the ReLU; before it come an array and a norm."""

    def program(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        a, b, *_ = _norms(x, z, scale, bias)
        return relu(a + z + b)

    assert_fused(program, X, Z, SCALE, BIAS, bn_act=1, bn_add_relu=1)


def test_a_norm_that_something_else_reads_stays_alone() -> None:
    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        a, b, c, _ = _norms(x, z, scale, bias)
        return relu(a + b + c), c

    assert operators(program, X, Z, SCALE, BIAS) == {"bn_add_relu": 1, "batch_norm": 2}


def test_a_pair_of_widened_arrays_is_two_calls() -> None:
    """They read x as it is stored; the operator of two inputs would need a wide copy of each."""

    def program(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        a, b = (batch_norm(array.astype(scale.dtype), scale, bias) for array in (x, z))
        return a + b

    narrow = (array.astype(jnp.bfloat16) for array in (X, Z))
    assert_fused(program, *narrow, SCALE, BIAS, bn_act=1, batch_norm=1)


def test_a_chain_that_would_be_a_cycle_stays_as_it_was() -> None:
    """What is added first depends on the statistics of the norm that is added last."""

    def program(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        mean, var = moments(z)
        last = normalise(z, mean, var, scale, bias)
        shifted = x + mean.sum()
        a = batch_norm(shifted, scale, bias)
        b = batch_norm(jnp.sin(x), scale, bias)
        return relu(a + b + last)

    assert_fused(program, X, Z, SCALE, BIAS, bn_add_relu=1, batch_norm=2)


def test_nothing_changes_without_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair and the chain are what `chains` finds, and nothing else does."""
    monkeypatch.setattr(find, "chains", lambda matches: [])

    def program(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        a, b, c, _ = _norms(x, z, scale, bias)
        return relu(a + b + c)

    assert operators(program, X, Z, SCALE, BIAS) == {"bn_add_relu": 1, "batch_norm": 2}
    assert jax_bnar.explain(program)(X, Z, SCALE, BIAS).refused == ()
