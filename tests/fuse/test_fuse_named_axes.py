"""Statistics over named axes as people write them: stacked, unpacked, over groups of devices."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from fuse_tools import in_float64, kernels, operators
from jax import lax
from named_axes_programs import (
    ARGUMENTS,
    FORMS,
    GROUPS,
    MAPPINGS,
    MAPPINGS_WITH_GROUPS,
    OTHER_GROUPS,
    WITHOUT_CHECKS,
    Layer,
    assert_equal,
    concatenated_and_split,
    in_shard_map,
    iterated,
    layer,
    mesh_of,
    moments,
    normalised,
    pmean,
    reference,
)
from property_tests import example_count

import jax_bnar


@pytest.mark.parametrize("statistics", FORMS, ids=lambda f: f.__name__)
def test_forms(statistics: Callable[..., Any]) -> None:
    for name, mapping in MAPPINGS.items():
        program = mapping(layer(statistics))
        assert operators(program, *ARGUMENTS) == {"bn_add_relu": 1}, name
        fused = jax_bnar.fuse(program)
        assert kernels(fused, *ARGUMENTS) == 1, name
        assert "reduce_sum" not in str(jax.make_jaxpr(fused)(*ARGUMENTS)), name
    assert_equal(MAPPINGS[WITHOUT_CHECKS](layer(statistics)), reference(), *ARGUMENTS)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_mappings(mapping: str) -> None:
    assert_equal(MAPPINGS[mapping](layer(iterated)), reference(), *ARGUMENTS)
    assert_equal(MAPPINGS[mapping](layer(concatenated_and_split)), reference(), *ARGUMENTS)


def test_fuse_inside_of_shard_map() -> None:
    for check_vma in (True, False):
        program = in_shard_map(jax_bnar.fuse(layer(iterated)), check_vma=check_vma)
        assert kernels(program, *ARGUMENTS) == 1
        assert_equal(program, reference(), *ARGUMENTS)


@pytest.mark.parametrize("statistics", FORMS, ids=lambda f: f.__name__)
def test_groups(statistics: Callable[..., Any]) -> None:
    for name in MAPPINGS_WITH_GROUPS:
        program = MAPPINGS[name](layer(statistics, GROUPS))
        assert operators(program, *ARGUMENTS) == {"bn_add_relu": 1}, name
        text = str(jax.make_jaxpr(jax_bnar.fuse(program))(*ARGUMENTS))
        assert "groups=((0, 2), (1, 3))" in text, text
    assert_equal(MAPPINGS[WITHOUT_CHECKS](layer(statistics, GROUPS)), reference(GROUPS), *ARGUMENTS)


def test_groups_under_pmap() -> None:
    assert_equal(MAPPINGS["pmap"](layer(iterated, GROUPS)), reference(GROUPS), *ARGUMENTS)


def test_joins_need_the_same_groups() -> None:
    def join(groups: Any) -> Layer:
        def body(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
            vectors = jnp.zeros_like(x), scale, bias
            mean, squares = (v.reshape(1, -1) for v in iterated(z, groups))
            other = (z - mean) * lax.rsqrt(squares - mean * mean + 1e-3)
            mean, squares = (v.reshape(1, -1) for v in iterated(x, GROUPS))
            first = (x - mean) * lax.rsqrt(squares - mean * mean + 1e-3) * vectors[1][None]
            return jax.nn.relu(first + other)

        return MAPPINGS[WITHOUT_CHECKS](body)

    assert operators(join([[3, 1], [2, 0]]), *ARGUMENTS) == {"dual_bn_add_relu": 1}
    assert operators(join(OTHER_GROUPS), *ARGUMENTS) == {"bn_add_relu": 1, "batch_norm": 1}
    for groups in ([[3, 1], [2, 0]], OTHER_GROUPS):
        assert_equal(join(groups), join(groups), *ARGUMENTS)


def test_groups_that_are_none() -> None:
    """One group is the whole axis, and groups of one device have statistics of their own."""
    whole = MAPPINGS[WITHOUT_CHECKS](layer(iterated, [[2, 0, 1, 3]]))
    assert "groups=None" in str(jax.make_jaxpr(jax_bnar.fuse(whole))(*ARGUMENTS))
    assert_equal(whole, reference(), *ARGUMENTS)
    alone = MAPPINGS[WITHOUT_CHECKS](layer(iterated, [[0], [1], [2], [3]]))
    assert operators(alone, *ARGUMENTS) == {"bn_add_relu": 1}
    assert "psum" not in str(jax.make_jaxpr(jax_bnar.fuse(alone))(*ARGUMENTS))
    assert_equal(alone, reference([[0], [1], [2], [3]]), *ARGUMENTS)


def test_the_mean_of_the_means_of_groups_is_that_of_the_axis() -> None:
    def statistics(x: Any, groups: Any) -> Any:
        mean, squares = lax.pmean(pmean(jnp.stack(moments(x)), GROUPS), "data")
        return mean, squares

    program = MAPPINGS[WITHOUT_CHECKS](layer(statistics))
    assert operators(program, *ARGUMENTS) == {"bn_add_relu": 1}
    assert_equal(program, reference(), *ARGUMENTS)


def test_groups_over_two_axes() -> None:
    """The groups count the indices of both axes in the order in which the program names them."""
    mesh = mesh_of(rows=2, columns=2)

    def over(names: Any) -> Layer:
        def body(x: Any, *rest: Any) -> jax.Array:
            both = lax.pmean(jnp.stack(moments(x)), names, axis_index_groups=OTHER_GROUPS)
            return normalised(x, *rest, *both)

        return in_shard_map(body, check_vma=False, mesh=mesh)

    for names in (("rows", "columns"), ("columns", "rows")):
        assert operators(over(names), *ARGUMENTS) == {"bn_add_relu": 1}
        assert_equal(over(names), over(names), *ARGUMENTS)


# What looks like one of the forms above, and is another function.


AXES = st.sampled_from([(), ("rows",), ("columns",), ("rows", "columns")])
PARTITIONS = st.sampled_from([None, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [2, 1]]])


@st.composite
def _sums(draw: Any) -> tuple[Any, Any, int]:
    """Axes, groups of their indices, and by how much the count is wrong."""
    names = draw(AXES)
    groups = draw(PARTITIONS) if len(names) == 2 else None
    return names, groups, draw(st.sampled_from([0, 0, 0, 0, 1]))


def _mean(array: Any, sums: tuple[Any, Any, int]) -> Any:
    names, groups, too_many = sums
    count = (2 if groups is not None else 2 ** len(names)) + too_many
    total = lax.psum(array, names, axis_index_groups=groups) if names else array
    return total / count


@pytest.mark.slow
@hypothesis.given(
    first=_sums(),
    second=st.sampled_from([None, None]) | _sums(),
    way=st.sampled_from(["stack", "last", "concatenate", "tuple"]),
    is_swapped=st.sampled_from([False, False, False, True]),
)
@hypothesis.settings(max_examples=example_count(40))
def test_any_sums(first: Any, second: Any, way: str, is_swapped: bool) -> None:
    """The two statistics are fused if they are sums over the same devices, with the right count."""
    same = second is None or second == first
    order = slice(None, None, -1 if is_swapped else 1)

    def body(x: Any, *rest: Any) -> jax.Array:
        both = moments(x)[order]
        if not same:
            assert second is not None
            both = [_mean(each, sums) for each, sums in zip(both, (first, second), strict=True)]
        elif way == "tuple":
            both = [_mean(each, first) for each in both]
        elif way == "concatenate":
            both = jnp.split(_mean(jnp.concatenate(both), first), 2)
        elif way == "last":
            both = _mean(jnp.stack(both, -1), first).transpose()
        else:
            both = _mean(jnp.stack(both), first)
        return normalised(x, *rest, *both)

    arguments = in_float64(ARGUMENTS)
    program = in_shard_map(body, check_vma=False, mesh=mesh_of(rows=2, columns=2))
    names, groups, too_many = first
    is_right = same and not is_swapped and not too_many
    assert operators(program, *arguments) == ({"bn_add_relu": 1} if is_right else {})
    if not is_right:
        return
    text = str(jax.make_jaxpr(jax_bnar.fuse(program))(*arguments))
    assert all(f"'{name}'" in text for name in names)
    assert ("groups=((" in text) == (groups is not None)
    assert_equal(program, program, *arguments, tolerance=1e-9)
