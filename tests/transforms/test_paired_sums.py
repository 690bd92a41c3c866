"""The primitive of two sums: values, derivatives, and which results a mapped axis reaches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_bnar._base.sums import paired_sums

AXES = (1, 3)
_rng = np.random.default_rng(7)
FIRST, SECOND = (jnp.asarray(_rng.standard_normal((2, 3, 5, 4))) for _ in range(2))


def sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    return paired_sums(first, second, AXES)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-13), found, expected)


@pytest.mark.parametrize("axes", [AXES, (0, 1), (0, 2), (0, 1, 2, 3), ()], ids=str)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values(transform: Any, axes: tuple[int, ...]):
    expected = (np.asarray(FIRST).sum(axes), np.asarray(SECOND).sum(axes))
    function = functools.partial(paired_sums, axes=axes)
    assert_equal(transform(function)(FIRST, SECOND), expected)


@pytest.mark.parametrize("axes", [AXES, (0, 1)], ids=str)
def test_derivatives_of_any_order(axes: tuple[int, ...]):
    def cubed(first: jax.Array, second: jax.Array) -> jax.Array:
        one, other = paired_sums(first * second, first**2, axes)
        return (one**2 * other).sum()

    check_grads(cubed, (FIRST / 4, SECOND), order=3, modes=("fwd", "rev"), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axes", "on_cpus"),
    [
        ((2, 3, 5, 4), (1, 3), 1),
        ((1, 12, 5, 1), (1, 3), 2),
        ((1, 12, 1, 4), (1, 3), 1),
        ((1, 1, 1, 1), (1, 3), 1),
    ],
    ids=["channels first", "channels last", "one channel", "one element"],
)
def test_reductions(shape: tuple[int, ...], axes: tuple[int, ...], on_cpus: int):
    """On CPUs two, where the last axis is kept; one for GPUs, which read the arrays once."""
    arrays = [jax.ShapeDtypeStruct(shape, np.float32)] * 2
    traced = jax.jit(functools.partial(paired_sums, axes=axes)).trace(*arrays)
    for platform, reductions in (("cpu", on_cpus), ("cuda", 1)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.reduce") == reductions


def test_derivatives_are_sums_of_pairs_too():
    def tangents(first_dot: jax.Array, second_dot: jax.Array) -> Any:
        return jax.jvp(sums, (FIRST, SECOND), (first_dot, second_dot))[1]

    assert str(jax.make_jaxpr(tangents)(FIRST, SECOND)).count("paired_sums") == 2
    assert_equal(tangents(SECOND, FIRST), sums(SECOND, FIRST))


@pytest.mark.parametrize("which", [0, 1])
def test_one_array_moves(which: int):
    def of_one(moved: jax.Array) -> Any:
        arrays = [FIRST, SECOND]
        arrays[which] = moved
        return sums(*arrays)

    dots = jax.jvp(of_one, (FIRST,), (SECOND,))[1]
    assert_equal(dots[which], np.asarray(SECOND).sum(AXES))
    assert not np.any(dots[1 - which])
    pullback = jax.vjp(of_one, FIRST)[1]
    (cotangent,) = pullback((jnp.full((2, 5), 2.0), jnp.full((2, 5), 3.0)))
    assert np.all(np.asarray(cotangent) == (2, 3)[which])


@pytest.mark.parametrize("mapped", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dim", [0, 2, 4])
def test_a_mapped_axis_reaches_what_depends_on_it(mapped: tuple[bool, bool], dim: int):
    whole = [
        jnp.stack([array, 2 * array, 3 * array], dim) if own else array
        for array, own in zip((FIRST, SECOND), mapped, strict=True)
    ]
    in_axes, out_axes = (tuple(axis if own else None for own in mapped) for axis in (dim, 0))
    found = jax.vmap(sums, in_axes, out_axes)(*whole)
    for result, array, own in zip(found, (FIRST, SECOND), mapped, strict=True):
        expected = np.asarray(array).sum(AXES)
        assert_equal(result, np.stack([expected, 2 * expected, 3 * expected]) if own else expected)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    # One of the arrays varies over the axis and the other does not.
    found = jax.jit(
        jax.shard_map(
            sums, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec
        )
    )(FIRST, SECOND[:1])
    assert_equal(found[0], np.asarray(FIRST).sum(AXES))
    assert_equal(found[1], np.tile(np.asarray(SECOND[:1]).sum(AXES), (2, 1)))
