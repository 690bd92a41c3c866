"""`batch_statistics`: the oracle's statistics and gradients, and the bits of `batch_norm` on CPUs.

Its transformations are those of every operator: `test_transformation_properties.py`, where it is
the kind "statistics", and `test_bad_input.py` has its errors.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    CORNER_SHAPES,
    RESNET_SHAPES,
    Case,
    all_dtypes,
    both_implementations,
    cases,
    cotangents,
    layouts,
    operands,
    operator,
)
from hypothesis import given, settings
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from outcomes import chain_of_squares, expected_results
from programs import hlo_calls, opcodes_of_size, ours, stablehlo_calls
from sharding_tools import (
    Collective,
    MeshKind,
    collectives,
    make_mesh,
    put,
    relative_difference,
    use_mesh,
)

import jax_bnar
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick


def of_input(case: Case) -> oracle.Array:
    """The x of a case, or the first of them."""
    x = operands(case).x
    return x[0] if isinstance(x, tuple) else x


def as_batch_norm(case: Case) -> Case:
    """The same x without anything that its statistics do not depend on."""
    return Case(
        case.shape,
        case.axis,
        case.dtype,
        form="batch_norm",
        scale_dtype=None,
        bias_dtype=None,
        num_groups=case.num_groups,
        ratio=case.ratio,
        seed=case.seed,
    )


def statistics(case: Case, implementation: Implementation, x: Any) -> Any:
    return jax_bnar.batch_statistics(
        x, axis=case.axis, num_groups=case.num_groups, implementation=implementation
    )


def with_gradient(case: Case, implementation: Implementation) -> Any:
    """mean, var and dx, as a compiled function of x, dmean and dvar."""

    @jax.jit
    def function(x: Any, dmean: Any, dvar: Any) -> Any:
        results, vjp = jax.vjp(lambda x: tuple(statistics(case, implementation, x)), x)
        return *results, *vjp((dmean, dvar))

    return function


def check(case: Case, implementation: Implementation) -> None:
    case = as_batch_norm(case)
    x, dout = of_input(case), cotangents(case)
    mean, var, dx = map(np.asarray, with_gradient(case, implementation)(x, dout.mean, dout.var))
    exact = expected_results(case, operands(case))
    assert mean.dtype == var.dtype == np.dtype(case.statistics_dtype)
    assert dx.dtype == x.dtype
    oracle.assert_within("mean", mean, exact.mean, exact.mean_allowance)
    times = chain_of_squares(implementation)
    oracle.assert_within("var", var, exact.var, exact.var_allowance, times=times)
    gradient = oracle.backward(
        np.zeros_like(dout.y),
        *(x, None, None, dout.mean, dout.var),
        epsilon=case.epsilon,
        axis=case.axis,
        num_groups=case.num_groups,
    )
    oracle.assert_within("dx", dx, gradient.dx, gradient.dx_allowance)
    if implementation == "xla":
        return  # XLA adds up in another order in another program.
    result = operator("batch_norm", implementation=implementation, **case.keywords)(
        x, None, None, None
    )
    np.testing.assert_array_equal(mean, result.mean)
    np.testing.assert_array_equal(var, result.var)


@both_implementations
@settings(max_examples=20)
@given(case=cases())
def test_agrees_with_oracle_and_batch_norm(implementation: Implementation, case: Case) -> None:
    check(case, implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@layouts(RESNET_SHAPES | {name: CORNER_SHAPES[name] for name in ("one-element", "rows4099")})
def test_shapes(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    check(Case(shape, axis, dtype), "ffi")


@both_implementations
@pytest.mark.parametrize("ratio", [1e3, 1e6])
def test_variance_survives_large_means(implementation: Implementation, ratio: float) -> None:
    case = Case((4099, 16), ratio=ratio, form="batch_norm")
    exact = expected_results(case, operands(case))
    mean, var = jax.jit(lambda x: statistics(case, implementation, x))(of_input(case))
    np.testing.assert_allclose(var, exact.var, rtol=1e-5)
    np.testing.assert_allclose(mean, exact.mean, rtol=2e-7)


@all_dtypes
def test_result(dtype: str) -> None:
    case = Case((6, 5, 7), dtype=dtype, num_groups=3)
    result = statistics(case, None, of_input(case))
    assert type(result) is jax_bnar.BatchStatisticsResult
    assert result.mean.shape == result.var.shape == (3, 7)
    np.testing.assert_array_equal(
        jax_bnar.batch_statistics(of_input(case).transpose(0, 2, 1), axis=1).mean,
        jax_bnar.batch_norm(of_input(case).transpose(0, 2, 1), None, None, axis=1).mean,
    )


def loss(x: Any, **keywords: Any) -> Any:
    mean, var = jax_bnar.batch_statistics(x, **keywords)
    return jnp.square(x).sum() + (mean * var).sum()


def test_one_call_and_none_for_the_gradient() -> None:
    """dx is in the loop of XLA that adds it to the other gradient of x."""
    x = of_input(Case((4, 6, 5, 33)))
    gradient = jax.value_and_grad(loss)
    for function in (loss, gradient):
        assert ours(function, x) == {"statistics": 1}
        for count in (stablehlo_calls, hlo_calls):
            assert count(function, x) == {"jax_bnar_statistics_v1": 1}
        assert not hlo_calls(lambda x, f=function: f(x, implementation="xla"), x)
    whole = opcodes_of_size(x.size, jax.grad(loss), x) - {"parameter", "bitcast", "call"}
    assert whole == {"fusion"}


def a_selection(shape: tuple[int, ...], axis: int, kind: str) -> np.ndarray:
    """Rows of different lengths, whole examples, or any elements; some of each group and channel.

    The groups are two.
    """
    random = np.random.default_rng(7)
    if kind == "elements":
        return random.random(shape) < 0.4
    selection = np.ones((1,) * len(shape), bool)
    half = shape[0] // 2
    examples = np.arange(shape[0]) % half < max(1, half - 2)
    selection = selection & examples.reshape(-1, *(1,) * (len(shape) - 1))
    if kind == "examples":
        return selection
    along = next(a for a in range(1, len(shape)) if a != axis % len(shape))
    lengths = random.integers(1, shape[along] + 1, shape[0])
    steps = np.arange(shape[along]).reshape([-1 if a == along else 1 for a in range(len(shape))])
    return selection & (steps < lengths.reshape(-1, *(1,) * (len(shape) - 1)))


@both_implementations
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("kind", ["rows", "examples", "elements"])
@pytest.mark.parametrize("axis", [-1, 1], ids=["last", "first"])
@all_dtypes
def test_selected_elements(
    dtype: str, axis: int, kind: str, num_groups: int, implementation: Implementation
) -> None:
    """They are those of the float64 numbers that are selected; no other one has any effect."""
    case = Case((12, 9, 19), axis, dtype, form="batch_norm", ratio=50.0, num_groups=num_groups)
    where = a_selection(case.shape, axis, kind)
    whole = np.broadcast_to(where, case.shape)
    x = of_input(case)
    x = np.where(whole, x, np.asarray(np.nan, x.dtype))
    random = np.random.default_rng(3)
    shape = (19 if axis == -1 else 9,)
    shape = shape if num_groups == 1 else (num_groups, *shape)
    dmean, dvar = (random.standard_normal(shape).astype(case.statistics_dtype) for _ in range(2))

    def function(x: Any) -> Any:
        results, vjp = jax.vjp(
            lambda x: tuple(
                jax_bnar.batch_statistics(
                    x,
                    axis=axis,
                    num_groups=num_groups,
                    where=jnp.asarray(where),
                    implementation=implementation,
                )
            ),
            x,
        )
        return *results, *vjp((jnp.asarray(dmean), jnp.asarray(dvar)))

    mean, var, dx = map(np.asarray, jax.jit(function)(x))
    wide = np.asarray(x, np.float64).reshape(num_groups, -1, *case.shape[1:])
    counted = whole.reshape(wide.shape)
    reduced = (1, 2) if axis == -1 else (1, 3)
    exact = wide.mean(reduced, keepdims=True, where=counted)
    centred = np.where(counted, wide - exact, 0)
    n = counted.sum(reduced, keepdims=True)
    exact_var = np.square(centred).sum(reduced, keepdims=True) / n
    of_channel = [a.astype(np.float64).reshape(exact.shape) for a in (dmean, dvar)]
    exact_dx = np.where(counted, (of_channel[0] + 2 * of_channel[1] * centred) / n, 0)
    rounding = float(np.finfo(case.statistics_dtype).eps)
    np.testing.assert_allclose(mean, exact.reshape(shape), rtol=4 * rounding)
    np.testing.assert_allclose(var, exact_var.reshape(shape), rtol=100 * rounding)
    exact_dx = exact_dx.reshape(case.shape)
    assert dx.dtype == x.dtype
    assert not dx[~whole].any()
    largest = np.abs(exact_dx).max()
    tolerance = {"float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 500 * rounding)
    np.testing.assert_allclose(
        np.asarray(dx, np.float64), exact_dx, rtol=0, atol=tolerance * largest
    )


def test_selected_elements_of_a_far_away_mean() -> None:
    """Neither the size of the mean nor an outlier that is selected first costs digits."""
    random = np.random.default_rng(0)
    x = (1e6 + random.standard_normal((4096, 3))).astype(np.float32)
    x[:, 1] = random.standard_normal(4096)
    x[0, 1] = 1e5
    where = random.random((4096, 1)) < 0.1
    where[0] = True
    mean, var = jax_bnar.batch_statistics(x, where=where)
    exact = np.asarray(x, np.float64)[where[:, 0]]
    np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7)
    np.testing.assert_allclose(var, exact.var(0), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_selected_elements_of_16_bits(dtype: str) -> None:
    """The error of a mean over all elements is not multiplied by how many are left out."""
    random = np.random.default_rng(0)
    x = (10 + random.standard_normal((100_000, 2))).astype(jnp.dtype(dtype))
    where = np.zeros((100_000, 1), bool)
    where[random.choice(100_000, 10, replace=False)] = True
    mean, var = jax_bnar.batch_statistics(x, where=where)
    exact = np.asarray(x, np.float64)[where[:, 0]]
    np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7)
    np.testing.assert_allclose(var, exact.var(0), rtol=1e-6)


def test_more_elements_are_selected_than_their_dtype_can_count() -> None:
    """A sum of ones in float32 stops growing at 2^24."""
    mean, var = jax_bnar.batch_statistics(
        jnp.ones((2**24 + 2, 1), jnp.bfloat16), where=np.ones((1, 1), bool)
    )
    assert (mean[0], var[0]) == (1, 0)
    odd = jnp.arange(2**17) % 2 == 1
    mean, var = jax_bnar.batch_statistics(odd.astype(jnp.float32)[:, None], where=odd[:, None])
    assert (mean[0], var[0]) == (1, 0)


def test_a_selected_infinity_is_that_of_the_mean() -> None:
    """As in `jnp.mean`; one that is not selected is nothing."""
    x = np.array([[1.0, np.inf], [np.inf, 2.0], [3.0, 4.0]], np.float32)
    where = np.array([[True, True], [False, True], [True, True]])
    mean, var = jax_bnar.batch_statistics(x, where=where)
    np.testing.assert_array_equal(mean, [2, np.inf])
    assert var[0] == 1
    assert np.isnan(var[1])


def test_selected_elements_by_two_calls() -> None:
    x = of_input(Case((4, 6, 5, 33)))
    where = np.arange(6).reshape(1, 6, 1, 1) < 4

    def selected(x: Any) -> Any:
        return loss(x, where=where)

    for function in (selected, jax.value_and_grad(selected)):
        assert hlo_calls(function, x) == {"jax_bnar_statistics_v1": 2}
    nothing = jax_bnar.batch_statistics(x, where=np.zeros((1, 1), bool))
    assert np.isnan(nothing.mean).all()
    assert np.isnan(nothing.var).all()


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        (np.ones((4, 6, 5, 1), np.float32), TypeError, "where must have dtype bool, got float32"),
        (
            np.ones((4, 6, 4, 1), bool),
            ValueError,
            r"where must broadcast to the shape of x, \(4, 6",
        ),
        (np.ones((1, 4, 6, 5, 33), bool), ValueError, "where must broadcast to the shape of x"),
        ([True], TypeError, "where must be an array, got list"),
    ],
    ids=["dtype", "shape", "axes", "type"],
)
def test_wrong_selection(where: Any, error: type[Exception], words: str) -> None:
    x = of_input(Case((4, 6, 5, 33)))
    with pytest.raises(error, match=f"batch_statistics: {words}"):
        jax_bnar.batch_statistics(x, where=where)


PLACES: dict[str, tuple[tuple[int, ...], dict[str, int], P, int]] = {
    "batch": ((16, 3, 24), {"d": 8}, P("d"), 24),
    "rows": ((3, 8, 24), {"d": 8}, P(None, "d"), 24),
    "data x channels": ((8, 3, 16), {"d": 4, "c": 2}, P("d", None, "c"), 8),
}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", PLACES)
def test_over_a_mesh_there_is_one_small_all_reduce(name: str, kind: MeshKind) -> None:
    """None follows in backward, because the devices share the cotangents of the statistics."""
    shape, sizes, spec, channels = PLACES[name]
    x, mesh = of_input(Case(shape)), make_mesh(kind, **sizes)
    placed = put(x, mesh, spec)

    def function(x: Any) -> Any:
        results, vjp = jax.vjp(lambda x: tuple(jax_bnar.batch_statistics(x)), x)
        return results, vjp(tuple(jnp.cos(r) for r in results))[0]

    with use_mesh(mesh):
        found = collectives(function, placed)
        actual = jax.jit(function)(placed)
    assert found == [[Collective("all-reduce", "f64", (1, 2 * channels))]]
    assert relative_difference(actual, jax.jit(function)(x)) < 5e-6
    assert actual[1].sharding.is_equivalent_to(placed.sharding, x.ndim)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", PLACES)
def test_selected_elements_over_a_mesh(name: str, kind: MeshKind) -> None:
    """Devices select different numbers of elements, and no array is gathered."""
    shape, sizes, spec, _ = PLACES[name]
    x, mesh = of_input(Case(shape)), make_mesh(kind, **sizes)
    where = a_selection(shape, -1, "rows")
    placed = put(x, mesh, spec)

    def function(x: Any, where: Any) -> Any:
        results, vjp = jax.vjp(lambda x: tuple(jax_bnar.batch_statistics(x, where=where)), x)
        return results, vjp(tuple(jnp.cos(r) for r in results))[0]

    with use_mesh(mesh):
        found = collectives(function, placed, where)
        actual = jax.jit(function)(placed, where)
    assert {each.opcode for operation in found for each in operation} == {"all-reduce"}
    assert relative_difference(actual, jax.jit(function)(x, where)) < 5e-6
    assert actual[1].sharding.is_equivalent_to(placed.sharding, x.ndim)


@pytest.mark.parametrize(("num_groups", "expected"), [(16, []), (4, ["all-reduce"])])
def test_groups_over_a_mesh(num_groups: int, expected: list[str]) -> None:
    x, mesh = of_input(Case((32, 3, 24))), make_mesh("auto", d=8)

    def function(x: Any) -> Any:
        return jax_bnar.batch_statistics(x, num_groups=num_groups)

    placed = put(x, mesh, P("d"))
    assert [c.opcode for o in collectives(function, placed) for c in o] == expected
    assert relative_difference(jax.jit(function)(placed), function(x)) < 1e-6
    gradient = jax.jit(jax.grad(lambda x: loss(x, num_groups=num_groups)))
    assert relative_difference(gradient(placed), gradient(x)) < 1e-5


def test_statistics_can_be_saved_by_name() -> None:
    """Under a policy that saves them, backward computes them no second time."""
    x = of_input(Case((4, 6, 33)))
    for policy, count in (("bnar_statistics", 1), ("other", 2)):
        rule = jax.checkpoint_policies.save_only_these_names(policy)
        block = jax.checkpoint(lambda x: jnp.sin(loss(jnp.sin(x))), policy=rule)
        assert ours(jax.jit(jax.value_and_grad(block)), x) == {"statistics": count}


@pytest.mark.parametrize("groups", [None, [[0, 3], [1, 2]], [[0], [1, 2, 3]]], ids=str)
@pytest.mark.parametrize("how", ["pmap", "check_vma", "no check_vma"])
@pytest.mark.parametrize("selected", [False, True], ids=["all", "selected"])
def test_gradients_over_a_named_axis(how: str, groups: Any, selected: bool) -> None:
    """Against the plain mean of the groups, on four devices, each with results of its own."""
    where = np.arange(6)[:, None] < 4 if selected else np.ones((6, 1), bool)
    if groups is not None and how == "check_vma":
        pytest.skip("JAX does not support axis_index_groups there")
    x = of_input(Case((4, 6, 5), dtype="float64"))

    def mapped(x: Any) -> Any:
        def own(x: Any) -> Any:
            options: Any = {"axis_name": "d", "axis_index_groups": groups}
            options |= {"where": where} if selected else {}
            return jnp.stack(jax_bnar.batch_statistics(x, **options))

        if how == "pmap":
            return jax.pmap(own, "d", devices=jax.devices()[:4])(x)
        return jax.shard_map(
            lambda x: own(x[0])[None],
            mesh=Mesh(np.array(jax.devices()[:4]), ("d",)),
            in_specs=P("d"),
            out_specs=P("d"),
            check_vma=how == "check_vma",
        )(x)

    def formula(x: Any) -> Any:
        results = [jnp.zeros(())] * 4
        for group in groups or [range(4)]:
            whole = x[np.asarray(list(group))][:, where[:, 0]].reshape(-1, 5)
            for index in group:
                results[index] = jnp.stack([whole.mean(0), whole.var(0)])
        return jnp.stack(results)

    def both(function: Any) -> Any:
        def weighted(x: Any) -> Any:
            results = function(x)
            weights = jnp.cos(jnp.arange(results.size)).reshape(results.shape)
            return (jnp.sin(results) * weights).sum(), results

        return jax.jit(jax.value_and_grad(weighted, has_aux=True))(x)

    assert relative_difference(both(mapped), both(formula)) < 1e-12
