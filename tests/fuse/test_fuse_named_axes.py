"""Statistics over named axes as people write them: stacked, unpacked, over groups of devices."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, assert_untouched, error, in_float64, kernels, operators
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from property_tests import example_count

import jax_bnar

ROWS, CHANNELS, DEVICES = 32, 6, 4
ARGUMENTS = (
    array((ROWS, CHANNELS)),
    array((ROWS, CHANNELS), 1),
    array((CHANNELS,), 2),
    array((CHANNELS,), 3),
)
GROUPS = [[0, 2], [3, 1]]
OTHER_GROUPS = [[0, 1], [2, 3]]

Layer = Callable[..., jax.Array]


def _moments(x: Any) -> tuple[jax.Array, jax.Array]:
    return x.mean(0), jnp.square(x).mean(0)


def _apply(x: Any, z: Any, scale: Any, bias: Any, mean: Any, squares: Any) -> jax.Array:
    mean, squares = mean.reshape(1, -1), squares.reshape(1, -1)
    y = (x - mean) * lax.rsqrt(squares - mean * mean + 1e-3) * scale[None] + bias[None]
    return jax.nn.relu(y + z)


def _pmean(array: Any, groups: Any) -> jax.Array:
    return lax.pmean(array, "data", axis_index_groups=groups)


def _psum(array: Any, groups: Any) -> jax.Array:
    return lax.psum(array, "data", axis_index_groups=groups)


def _size(groups: Any) -> int:
    return DEVICES if groups is None else len(groups[0])


def iterated(x: Any, groups: Any) -> Any:
    mean, squares = _pmean(jnp.stack(_moments(x)), groups)
    return mean, squares


def indexed(x: Any, groups: Any) -> Any:
    both = _pmean(jnp.stack(_moments(x)), groups)
    return both[0], both[-1]


def indexed_along_the_last_axis(x: Any, groups: Any) -> Any:
    both = _pmean(jnp.stack(_moments(x), -1), groups)
    return both[..., 0], both[..., 1]


def split(x: Any, groups: Any) -> Any:
    return jnp.split(_pmean(jnp.stack(_moments(x)), groups), 2)


def unstacked(x: Any, groups: Any) -> Any:
    return jnp.unstack(_pmean(jnp.stack(_moments(x), 1), groups), axis=1)


def stacked_with_kept_axes(x: Any, groups: Any) -> Any:
    sums = x.sum(0, keepdims=True), (x * x).sum(0, keepdims=True)
    return _psum(jnp.stack(sums), groups) / (len(x) * _size(groups))


def an_array_of_both(x: Any, groups: Any) -> Any:
    return _pmean(jnp.array(_moments(x)), groups)


def concatenated_and_split(x: Any, groups: Any) -> Any:
    return jnp.split(_pmean(jnp.concatenate(_moments(x)), groups), 2)


def concatenated_and_sliced(x: Any, groups: Any) -> Any:
    both = _pmean(jnp.hstack(_moments(x)), groups)
    return both[:CHANNELS], both[CHANNELS:]


def concatenated_and_reshaped(x: Any, groups: Any) -> Any:
    return _pmean(jnp.concatenate(_moments(x)), groups).reshape(2, -1)


def sums_by_the_size(x: Any, groups: Any) -> Any:
    mean, squares = _psum(jnp.stack(_moments(x)), groups) / _psum(1, groups)
    return mean, squares


def sums_by_a_count_that_is_summed(x: Any, groups: Any) -> Any:
    count = _psum(jnp.asarray(len(x), x.dtype), groups)
    total, squares = _psum(jnp.stack([x.sum(0), (x * x).sum(0)]), groups)
    return total / count, squares / count


def sums_with_the_count_in_the_stack(x: Any, groups: Any) -> Any:
    """As PyTorch's SyncBatchNorm does: devices say how many examples they have."""
    count = jnp.full((CHANNELS,), len(x), x.dtype)
    total, squares, count = _psum(jnp.stack([x.sum(0), (x * x).sum(0), count]), groups)
    return total / count, squares / count


def a_tuple_with_a_count(x: Any, groups: Any) -> Any:
    one = jnp.ones((), x.dtype)
    mean, squares, count = _psum((*_moments(x), one), groups)
    return mean / count, squares / count


def the_arrays_stacked(x: Any, groups: Any) -> Any:
    mean, squares = _pmean(jnp.stack([x, x * x]).mean(1), groups)
    return mean, squares


def centred_by_the_global_mean(x: Any, groups: Any) -> Any:
    mean = _pmean(x.mean(0), groups)
    return mean, _pmean(jnp.square(x - mean[None]).mean(0), groups) + mean * mean


FORMS = [
    iterated,
    indexed,
    indexed_along_the_last_axis,
    split,
    unstacked,
    stacked_with_kept_axes,
    an_array_of_both,
    concatenated_and_split,
    concatenated_and_sliced,
    concatenated_and_reshaped,
    sums_by_the_size,
    sums_by_a_count_that_is_summed,
    sums_with_the_count_in_the_stack,
    a_tuple_with_a_count,
    the_arrays_stacked,
    centred_by_the_global_mean,
]


def layer(statistics: Callable[..., Any], groups: Any = None) -> Layer:
    return lambda x, *rest: _apply(x, *rest, *statistics(x, groups))


def _mesh(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def _in_shard_map(body: Layer, *, check_vma: bool, mesh: Mesh | None = None) -> Layer:
    mesh = mesh or _mesh(data=DEVICES)
    rows = P(tuple(mesh.axis_names))
    return jax.shard_map(
        body, mesh=mesh, in_specs=(rows, rows, P(), P()), out_specs=rows, check_vma=check_vma
    )


def _mapped(map_of: Callable[..., Any]) -> Callable[[Layer], Layer]:
    """A layer over arrays that `map_of`, a vmap or a pmap, splits into parts."""

    def mapped(body: Layer) -> Layer:
        def whole(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
            parts = (a.reshape(DEVICES, -1, CHANNELS) for a in (x, z))
            y = map_of(body, in_axes=(0, 0, None, None), axis_name="data")(*parts, scale, bias)
            return y.reshape(x.shape)

        return whole

    return mapped


WITHOUT_CHECKS = "shard_map, check_vma=False"
MAPPINGS: dict[str, Callable[[Layer], Layer]] = {
    WITHOUT_CHECKS: lambda body: _in_shard_map(body, check_vma=False),
    "shard_map, check_vma=True": lambda body: _in_shard_map(body, check_vma=True),
    "vmap": _mapped(jax.vmap),
    "pmap": _mapped(jax.pmap),
}
# JAX takes groups in these only.
MAPPINGS_WITH_GROUPS = (WITHOUT_CHECKS, "pmap")


def reference(groups: Any = None) -> Layer:
    """BatchNorm over the rows of each group of devices, without named axes."""

    def whole(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        results: list[Any] = [None] * DEVICES
        parts = [jnp.split(a, DEVICES) for a in (x, z)]
        for group in groups or [list(range(DEVICES))]:
            xs, zs = (jnp.concatenate([part[i] for i in group]) for part in parts)
            y = jax.nn.relu(
                (xs - xs.mean(0)[None]) * lax.rsqrt(xs.var(0) + 1e-3)[None] * scale[None]
                + bias[None]
                + zs
            )
            for index, rows in zip(group, jnp.split(y, len(group)), strict=True):
                results[index] = rows
        return jnp.concatenate(results)

    return whole


def _value_and_gradients(function: Layer) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        y = function(*args)
        weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
        return jnp.sum(y * weights), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def _assert_equal(program: Layer, expected: Layer, *args: Any, tolerance: float = 2e-5) -> None:
    """Values and gradients of the fused program are those of the expected one in float64."""
    given = _value_and_gradients(jax_bnar.fuse(program))(*args)
    exact = _value_and_gradients(expected)(*in_float64(args))
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(exact), strict=True):
        assert error(a, b) <= tolerance * (1 + float(np.max(np.abs(b))))


@pytest.mark.parametrize("statistics", FORMS, ids=lambda f: f.__name__)
def test_forms(statistics: Callable[..., Any]) -> None:
    for name, mapping in MAPPINGS.items():
        program = mapping(layer(statistics))
        assert operators(program, *ARGUMENTS) == {"bn_add_relu": 1}, name
        fused = jax_bnar.fuse(program)
        assert kernels(fused, *ARGUMENTS) == 1, name
        assert "reduce_sum" not in str(jax.make_jaxpr(fused)(*ARGUMENTS)), name
    _assert_equal(MAPPINGS[WITHOUT_CHECKS](layer(statistics)), reference(), *ARGUMENTS)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_mappings(mapping: str) -> None:
    _assert_equal(MAPPINGS[mapping](layer(iterated)), reference(), *ARGUMENTS)
    _assert_equal(MAPPINGS[mapping](layer(concatenated_and_split)), reference(), *ARGUMENTS)


def test_fuse_inside_of_shard_map() -> None:
    for check_vma in (True, False):
        program = _in_shard_map(jax_bnar.fuse(layer(iterated)), check_vma=check_vma)
        assert kernels(program, *ARGUMENTS) == 1
        _assert_equal(program, reference(), *ARGUMENTS)


@pytest.mark.parametrize("statistics", FORMS, ids=lambda f: f.__name__)
def test_groups(statistics: Callable[..., Any]) -> None:
    for name in MAPPINGS_WITH_GROUPS:
        program = MAPPINGS[name](layer(statistics, GROUPS))
        assert operators(program, *ARGUMENTS) == {"bn_add_relu": 1}, name
        text = str(jax.make_jaxpr(jax_bnar.fuse(program))(*ARGUMENTS))
        assert "groups=((0, 2), (1, 3))" in text, text
    _assert_equal(
        MAPPINGS[WITHOUT_CHECKS](layer(statistics, GROUPS)), reference(GROUPS), *ARGUMENTS
    )


def test_groups_under_pmap() -> None:
    _assert_equal(MAPPINGS["pmap"](layer(iterated, GROUPS)), reference(GROUPS), *ARGUMENTS)


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
        _assert_equal(join(groups), join(groups), *ARGUMENTS)


def test_groups_that_are_none() -> None:
    """One group is the whole axis, and groups of one device have statistics of their own."""
    whole = MAPPINGS[WITHOUT_CHECKS](layer(iterated, [[2, 0, 1, 3]]))
    assert "groups=None" in str(jax.make_jaxpr(jax_bnar.fuse(whole))(*ARGUMENTS))
    _assert_equal(whole, reference(), *ARGUMENTS)
    alone = MAPPINGS[WITHOUT_CHECKS](layer(iterated, [[0], [1], [2], [3]]))
    assert operators(alone, *ARGUMENTS) == {"bn_add_relu": 1}
    assert "psum" not in str(jax.make_jaxpr(jax_bnar.fuse(alone))(*ARGUMENTS))
    _assert_equal(alone, reference([[0], [1], [2], [3]]), *ARGUMENTS)


def test_the_mean_of_the_means_of_groups_is_that_of_the_axis() -> None:
    def statistics(x: Any, groups: Any) -> Any:
        mean, squares = lax.pmean(_pmean(jnp.stack(_moments(x)), GROUPS), "data")
        return mean, squares

    program = MAPPINGS[WITHOUT_CHECKS](layer(statistics))
    assert operators(program, *ARGUMENTS) == {"bn_add_relu": 1}
    _assert_equal(program, reference(), *ARGUMENTS)


def test_groups_over_two_axes() -> None:
    """The groups count the indices of both axes in the order in which the program names them."""
    mesh = _mesh(rows=2, columns=2)

    def over(names: Any) -> Layer:
        def body(x: Any, *rest: Any) -> jax.Array:
            both = lax.pmean(jnp.stack(_moments(x)), names, axis_index_groups=OTHER_GROUPS)
            return _apply(x, *rest, *both)

        return _in_shard_map(body, check_vma=False, mesh=mesh)

    for names in (("rows", "columns"), ("columns", "rows")):
        assert operators(over(names), *ARGUMENTS) == {"bn_add_relu": 1}
        _assert_equal(over(names), over(names), *ARGUMENTS)


# What looks like one of the forms above, and is another function.


def swapped(x: Any, groups: Any) -> Any:
    squares, mean = _pmean(jnp.stack(_moments(x)), groups)
    return mean, squares


def swapped_by_concatenation(x: Any, groups: Any) -> Any:
    return jnp.split(_pmean(jnp.concatenate(_moments(x)[::-1]), groups), 2)


def reversed_channels(x: Any, groups: Any) -> Any:
    both = _pmean(jnp.stack(_moments(x)), groups)
    return both[0, ::-1], both[1, ::-1]


def interleaved(x: Any, groups: Any) -> Any:
    """Splits at half what alternates between mean and squares."""
    return jnp.split(_pmean(jnp.stack(_moments(x), -1).reshape(-1), groups), 2)


def cut_in_the_wrong_place(x: Any, groups: Any) -> Any:
    both = _pmean(jnp.concatenate([*_moments(x), x.mean(0)]), groups)
    return both[1 : CHANNELS + 1], both[CHANNELS : 2 * CHANNELS]


def products_of_two_stacks(x: Any, groups: Any) -> Any:
    both = _pmean(jnp.stack(_moments(x)), groups)
    table = both[:, None] * both[None] / (both[0] * both[0])[None, None]
    return table[0, 1], table[1, 1]


def squares_of_another_array(x: Any, groups: Any) -> Any:
    mean, squares = _pmean(jnp.stack([x.mean(0), jnp.square(x + 1.0).mean(0)]), groups)
    return mean, squares


def a_wrong_count(x: Any, groups: Any) -> Any:
    mean, squares = _psum(jnp.stack(_moments(x)), groups) / (_size(groups) - 1)
    return mean, squares


def a_wrong_count_of_examples(x: Any, groups: Any) -> Any:
    count = _psum(jnp.asarray(len(x) - 1, x.dtype), groups)
    total, squares = _psum(jnp.stack([x.sum(0), (x * x).sum(0)]), groups)
    return total / count, squares / count


def one_wrong_count(x: Any, groups: Any) -> Any:
    total, squares = _psum(jnp.stack(_moments(x)), groups)
    return total / _size(groups), squares / (_size(groups) + 1)


def mean_of_the_device(x: Any, groups: Any) -> Any:
    mean, squares = _moments(x)
    return mean, _pmean(squares, groups)


def squares_of_the_device(x: Any, groups: Any) -> Any:
    mean, squares = _moments(x)
    return _pmean(mean, groups), squares


def mean_of_local_variances(x: Any, groups: Any) -> Any:
    """The usual mistake: it misses how the means differ between devices."""
    mean, var = _pmean(jnp.stack([x.mean(0), x.var(0)]), groups)
    return mean, var + mean * mean


def a_count_that_differs_between_devices(x: Any, groups: Any) -> Any:
    count = 1.0 + lax.axis_index("data").astype(x.dtype)
    mean, squares = _pmean(jnp.stack(_moments(x)) * count, groups)
    return mean, squares


def largest_of_the_devices(x: Any, groups: Any) -> Any:
    mean, squares = lax.pmax(jnp.stack(_moments(x)), "data", axis_index_groups=groups)
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
    mean, squares = _moments(x)
    return _pmean(mean, GROUPS), _pmean(squares, None)


def groups_of_the_squares_alone(x: Any) -> Any:
    mean, squares = _moments(x)
    return _pmean(mean, None), _pmean(squares, GROUPS)


def other_groups(x: Any) -> Any:
    mean, squares = _moments(x)
    return _pmean(mean, GROUPS), _pmean(squares, OTHER_GROUPS)


def groups_within_groups(x: Any) -> Any:
    """Pairs of pairs, which together are the whole axis: it is left alone."""
    mean, squares = _pmean(_pmean(jnp.stack(_moments(x)), GROUPS), OTHER_GROUPS)
    return mean, squares


def groups_of_other_sizes(x: Any) -> Any:
    mean, squares = _pmean(jnp.stack(_moments(x)), [[0, 1, 2], [3]])
    return mean, squares


def groups_counted_by_the_devices(x: Any) -> Any:
    groups = [[0, 1, 2], [3]]
    count = lax.psum(jnp.ones((), x.dtype), "data", axis_index_groups=groups)
    mean, squares = _psum(jnp.stack(_moments(x)), groups) / count
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
    program = MAPPINGS[WITHOUT_CHECKS](lambda x, *rest: _apply(x, *rest, *statistics(x)))
    assert_untouched(program, *ARGUMENTS, reason=reason)


def test_groups_of_one_axis_and_the_whole_of_another_are_refused() -> None:
    def body(x: Any, *rest: Any) -> jax.Array:
        both = lax.pmean(jnp.stack(_moments(x)), "rows", axis_index_groups=[[0], [1]])
        both = lax.pmean(both, "columns", axis_index_groups=[[0, 1], [2, 3]])
        return _apply(x, *rest, *lax.pmean(both, "rows"))

    mesh = _mesh(rows=2, columns=4)
    program = _in_shard_map(body, check_vma=False, mesh=mesh)
    assert_untouched(program, *ARGUMENTS, reason="takes axis_index_groups over both names")


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
        both = _moments(x)[order]
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
        return _apply(x, *rest, *both)

    arguments = in_float64(ARGUMENTS)
    program = _in_shard_map(body, check_vma=False, mesh=_mesh(rows=2, columns=2))
    names, groups, too_many = first
    is_right = same and not is_swapped and not too_many
    assert operators(program, *arguments) == ({"bn_add_relu": 1} if is_right else {})
    if not is_right:
        return
    text = str(jax.make_jaxpr(jax_bnar.fuse(program))(*arguments))
    assert all(f"'{name}'" in text for name in names)
    assert ("groups=((" in text) == (groups is not None)
    _assert_equal(program, program, *arguments, tolerance=1e-9)
