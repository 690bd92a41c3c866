"""Sums over named axes that are not the statistics of a BatchNorm, though they look like it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fuse_tools import assert_untouched, operators
from jax import lax
from named_axes_programs import (
    ARGUMENTS,
    CHANNELS,
    GROUPS,
    MAPPINGS,
    OTHER_GROUPS,
    WITHOUT_CHECKS,
    Layer,
    in_shard_map,
    layer,
    mesh_of,
    moments,
    normalised,
    pmean,
    psum,
    size_of,
)

import jax_bnar


def swapped(x: Any, groups: Any) -> Any:
    squares, mean = pmean(jnp.stack(moments(x)), groups)
    return mean, squares


def swapped_by_concatenation(x: Any, groups: Any) -> Any:
    return jnp.split(pmean(jnp.concatenate(moments(x)[::-1]), groups), 2)


def reversed_channels(x: Any, groups: Any) -> Any:
    both = pmean(jnp.stack(moments(x)), groups)
    return both[0, ::-1], both[1, ::-1]


def interleaved(x: Any, groups: Any) -> Any:
    """Splits at half what alternates between mean and squares."""
    return jnp.split(pmean(jnp.stack(moments(x), -1).reshape(-1), groups), 2)


def cut_in_the_wrong_place(x: Any, groups: Any) -> Any:
    both = pmean(jnp.concatenate([*moments(x), x.mean(0)]), groups)
    return both[1 : CHANNELS + 1], both[CHANNELS : 2 * CHANNELS]


def products_of_two_stacks(x: Any, groups: Any) -> Any:
    both = pmean(jnp.stack(moments(x)), groups)
    table = both[:, None] * both[None] / (both[0] * both[0])[None, None]
    return table[0, 1], table[1, 1]


def squares_of_another_array(x: Any, groups: Any) -> Any:
    mean, squares = pmean(jnp.stack([x.mean(0), jnp.square(x + 1.0).mean(0)]), groups)
    return mean, squares


def a_wrong_count(x: Any, groups: Any) -> Any:
    mean, squares = psum(jnp.stack(moments(x)), groups) / (size_of(groups) - 1)
    return mean, squares


def a_wrong_count_of_examples(x: Any, groups: Any) -> Any:
    count = psum(jnp.asarray(len(x) - 1, x.dtype), groups)
    total, squares = psum(jnp.stack([x.sum(0), (x * x).sum(0)]), groups)
    return total / count, squares / count


def one_wrong_count(x: Any, groups: Any) -> Any:
    total, squares = psum(jnp.stack(moments(x)), groups)
    return total / size_of(groups), squares / (size_of(groups) + 1)


def mean_of_the_device(x: Any, groups: Any) -> Any:
    mean, squares = moments(x)
    return mean, pmean(squares, groups)


def squares_of_the_device(x: Any, groups: Any) -> Any:
    mean, squares = moments(x)
    return pmean(mean, groups), squares


def mean_of_local_variances(x: Any, groups: Any) -> Any:
    """The usual mistake: it misses how the means differ between devices."""
    mean, var = pmean(jnp.stack([x.mean(0), x.var(0)]), groups)
    return mean, var + mean * mean


def a_count_that_differs_between_devices(x: Any, groups: Any) -> Any:
    count = 1.0 + lax.axis_index("data").astype(x.dtype)
    mean, squares = pmean(jnp.stack(moments(x)) * count, groups)
    return mean, squares


def largest_of_the_devices(x: Any, groups: Any) -> Any:
    mean, squares = lax.pmax(jnp.stack(moments(x)), "data", axis_index_groups=groups)
    return mean, squares


LOOKALIKES = [
    swapped,
    swapped_by_concatenation,
    reversed_channels,
    interleaved,
    cut_in_the_wrong_place,
    products_of_two_stacks,
    squares_of_another_array,
    a_wrong_count,
    a_wrong_count_of_examples,
    one_wrong_count,
    mean_of_the_device,
    squares_of_the_device,
    mean_of_local_variances,
    a_count_that_differs_between_devices,
    largest_of_the_devices,
]


@pytest.mark.parametrize("statistics", LOOKALIKES, ids=lambda f: f.__name__)
def test_lookalikes(statistics: Callable[..., Any]) -> None:
    for name, mapping in MAPPINGS.items():
        if statistics is largest_of_the_devices and name != WITHOUT_CHECKS:
            continue
        program = mapping(layer(statistics))
        assert operators(program, *ARGUMENTS) == {}, name
        _assert_same_program(program)
    _assert_same_program(MAPPINGS[WITHOUT_CHECKS](layer(statistics, GROUPS)))


def _assert_same_program(program: Layer) -> None:
    fused = jax_bnar.fuse(program)
    assert str(jax.make_jaxpr(fused)(*ARGUMENTS)) == str(jax.make_jaxpr(program)(*ARGUMENTS))


def groups_of_the_mean_alone(x: Any) -> Any:
    mean, squares = moments(x)
    return pmean(mean, GROUPS), pmean(squares, None)


def groups_of_the_squares_alone(x: Any) -> Any:
    mean, squares = moments(x)
    return pmean(mean, None), pmean(squares, GROUPS)


def other_groups(x: Any) -> Any:
    mean, squares = moments(x)
    return pmean(mean, GROUPS), pmean(squares, OTHER_GROUPS)


def groups_within_groups(x: Any) -> Any:
    """Pairs of pairs, which together are the whole axis: it is left alone."""
    mean, squares = pmean(pmean(jnp.stack(moments(x)), GROUPS), OTHER_GROUPS)
    return mean, squares


def groups_of_other_sizes(x: Any) -> Any:
    mean, squares = pmean(jnp.stack(moments(x)), [[0, 1, 2], [3]])
    return mean, squares


def groups_counted_by_the_devices(x: Any) -> Any:
    groups = [[0, 1, 2], [3]]
    count = lax.psum(jnp.ones((), x.dtype), "data", axis_index_groups=groups)
    mean, squares = psum(jnp.stack(moments(x)), groups) / count
    return mean, squares


@pytest.mark.parametrize(
    ("statistics", "reason"),
    [
        (groups_of_the_mean_alone, "other axes than those of the mean"),
        (groups_of_the_squares_alone, "other axes than those of the mean"),
        (other_groups, "other axes than those of the mean"),
        (groups_within_groups, "not understood"),
        (groups_of_other_sizes, "differ in size"),
        (groups_counted_by_the_devices, "differ in size"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_groups_that_are_refused(statistics: Callable[..., Any], reason: str) -> None:
    program = MAPPINGS[WITHOUT_CHECKS](lambda x, *rest: normalised(x, *rest, *statistics(x)))
    assert_untouched(program, *ARGUMENTS, reason=reason)


def test_groups_of_one_axis_and_the_whole_of_another_are_refused() -> None:
    def body(x: Any, *rest: Any) -> jax.Array:
        both = lax.pmean(jnp.stack(moments(x)), "rows", axis_index_groups=[[0], [1]])
        both = lax.pmean(both, "columns", axis_index_groups=[[0, 1], [2, 3]])
        return normalised(x, *rest, *lax.pmean(both, "rows"))

    mesh = mesh_of(rows=2, columns=4)
    program = in_shard_map(body, check_vma=False, mesh=mesh)
    assert_untouched(program, *ARGUMENTS, reason="takes axis_index_groups over both names")
