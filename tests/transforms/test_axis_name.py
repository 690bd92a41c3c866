"""Statistics over named axes with shard_map, pmap and vmap equal those of one call.

Every way of mapping is compared with the same operator on the whole array, which test_forward and
test_backward compare with the oracle.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FORMS, Case, Form, call, inputs_of, one_or_two_inputs, operands, operation_of
from jax.sharding import PartitionSpec as P
from programs import hlo_calls, ours
from sharding_tools import Collective, collectives, make_mesh, put, relative_difference

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((16, 3, 6))
PARTS = 8
X, Z, SCALE, BIAS = operands(CASE)
# A residual is there for all forms of one input, some of which do not read it.
GIVEN = {form: operands(Case(CASE.shape, form=form))._replace(z=Z) for form in FORMS}
_RANDOM = np.random.default_rng(7)
WEIGHT = _RANDOM.standard_normal(CASE.shape).astype(np.float32)
WEIGHT_OF_MEAN = _RANDOM.standard_normal(6).astype(np.float32)
ALL = (0, 1, 2, 3)


def total(y: Any, mean: Any, var: Any, weight: Any = WEIGHT) -> Any:
    """A loss that depends on y and, nonlinearly, on the statistics."""
    return (y * weight).sum() + of_statistics(mean, var)


def of_statistics(mean: Any, var: Any) -> Any:
    """The statistics of a second input count otherwise than those of the first one."""
    each = zip(jax.tree.leaves(mean), jax.tree.leaves(var), strict=True)
    return sum((i * m * WEIGHT_OF_MEAN + v * v).sum() for i, (m, v) in enumerate(each, start=1))


@functools.cache
def expected(form: Form, **keywords: Any) -> Any:
    def loss(*given: Any) -> Any:
        return total(*call(form, *given, **keywords))

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, ALL))(*GIVEN[form]))


def assert_as_expected(actual: Any, form: Form, **keywords: Any) -> None:
    assert relative_difference(actual, expected(form, **keywords)) < 2e-6


def split(tree: Any, *parts: int) -> Any:
    return jax.tree.map(lambda array: array.reshape(*parts, -1, *array.shape[1:]), tree)


def results_of(form: Form, *given: Any, **keywords: Any) -> Any:
    """(y, mean, var), not as a named tuple."""
    return tuple(call(form, *given, **keywords))


def grad_around_shard_map(form: Form, mesh: Any, *, check_vma: bool, **keywords: Any) -> Any:
    names = mesh.axis_names
    mapped = jax.shard_map(
        functools.partial(results_of, form, axis_name=names, **keywords),
        mesh=mesh,
        in_specs=(P(names), P(names), P(), P()),
        out_specs=(P(names), P(), P()),
        check_vma=check_vma,
    )
    return jax.jit(jax.value_and_grad(lambda *given: total(*mapped(*given)), ALL))


def grad_inside_shard_map(form: Form, mesh: Any, *, check_vma: bool, **keywords: Any) -> Any:
    """With check_vma, JAX sums the gradients of what devices share; otherwise the user does."""
    names = mesh.axis_names

    def step(x: Any, z: Any, scale: Any, bias: Any, weight: Any) -> Any:
        def loss(*given: Any) -> Any:
            y, mean, var = results_of(form, *given, axis_name=names, **keywords)
            own = (y * weight).sum()
            if check_vma:
                return jax.lax.psum(own, names) + of_statistics(mean, var)
            return own + of_statistics(mean, var) / mesh.size

        value, (dx, dz, *shared) = jax.value_and_grad(loss, ALL)(x, z, scale, bias)
        if not check_vma:
            value, shared = jax.lax.psum((value, shared), names)
        return value, (dx, dz, *shared)

    tensor = P(names)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(tensor, tensor, P(), P(), tensor),
        out_specs=(P(), (tensor, tensor, P(), P())),
        check_vma=check_vma,
    )
    return jax.jit(lambda x, z, scale, bias: mapped(x, z, scale, bias, WEIGHT))


shard_map_programs = pytest.mark.parametrize(
    "program", [grad_around_shard_map, grad_inside_shard_map], ids=["around", "inside"]
)
checks = pytest.mark.parametrize("check_vma", [True, False])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", ["y", "mask"])
@checks
@shard_map_programs
def test_shard_map(program: Callable[..., Any], check_vma: bool, save: Save, form: Form) -> None:
    mesh = make_mesh("auto", d=PARTS)
    run = program(form, mesh, check_vma=check_vma, save=save)
    assert_as_expected(run(*GIVEN[form]), form)


@checks
@shard_map_programs
def test_shard_map_over_two_axes(program: Callable[..., Any], check_vma: bool) -> None:
    mesh = make_mesh("auto", i=4, j=2)
    run = program("bn_add_relu", mesh, check_vma=check_vma, save="mask", implementation="xla")
    assert_as_expected(run(X, Z, SCALE, BIAS), "bn_add_relu")


def test_shard_map_on_an_explicit_mesh() -> None:
    mesh = make_mesh("explicit", d=PARTS)
    run = grad_around_shard_map("bn_relu", mesh, check_vma=True)
    placed = [put(a, mesh, P("d") if a.ndim > 1 else P()) for a in (X, Z, SCALE, BIAS)]
    with jax.set_mesh(mesh):
        assert_as_expected(run(*placed), "bn_relu")


def test_groups_of_the_batch_too() -> None:
    """Synchronised ghost batch: group g of every device forms one group."""
    mesh = make_mesh("auto", d=2)
    mapped = jax.shard_map(
        functools.partial(results_of, "bn_relu", axis_name="d", num_groups=4),
        mesh=mesh,
        in_specs=(P("d"), P(), P(), P()),
        out_specs=(P("d"), P(), P()),
    )
    y, mean, var = mapped(X, Z, SCALE, BIAS)
    # A group has 2 rows from each device.
    parts = X.reshape(2, 4, 2, 3, 6).swapaxes(0, 1)
    alone = jax_bnar.bn_relu(parts.reshape(16, 3, 6), SCALE, BIAS, num_groups=4)
    np.testing.assert_allclose(mean, alone.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(var, alone.var, rtol=1e-5)
    back = np.asarray(alone.y).reshape(4, 2, 2, 3, 6).swapaxes(0, 1).reshape(X.shape)
    np.testing.assert_allclose(y, back, rtol=1e-5, atol=1e-5)


def through(mapped: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradients of the whole array's loss; each part returns the statistics."""

    def loss(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, mean, var = mapped(split(x, PARTS), split(z, PARTS), scale, bias)
        # Take them from different parts, so that no single part gets the whole cotangent.
        first, last = (jax.tree.map(lambda v, i=i: v[i], v) for i, v in ((0, mean), (-1, var)))
        return (y.reshape(WEIGHT.shape) * WEIGHT).sum() + of_statistics(first, last)

    return jax.value_and_grad(loss, ALL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", ["y", "mask"])
def test_grad_of_vmap(save: Save, form: Form) -> None:
    mapped = jax.vmap(
        functools.partial(results_of, form, axis_name="d", save=save),
        (0, 0, None, None),
        axis_name="d",
    )
    assert_as_expected(jax.jit(through(mapped))(*GIVEN[form]), form)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("form", ["bn_relu", "dual_bn_add_relu"])
def test_grad_of_pmap(form: Form, implementation: Implementation) -> None:
    mapped = jax.pmap(
        functools.partial(results_of, form, axis_name="d", implementation=implementation),
        axis_name="d",
        in_axes=(0, 0, None, None),
    )
    assert_as_expected(through(mapped)(*GIVEN[form]), form)


@one_or_two_inputs
def test_vmap_of_grad(form: Form) -> None:
    """Each example differentiates its part of the loss, through the shared statistics."""
    x, z, scale, bias = GIVEN[form]

    def part(x: Any, z: Any, weight: Any) -> Any:
        def loss(*given: Any) -> Any:
            y, mean, var = results_of(form, *given, axis_name="d")
            return (y * weight).sum() + of_statistics(mean, var) / PARTS

        return jax.value_and_grad(loss, ALL)(x, z, scale, bias)

    value, (dx, dz, *shared) = jax.jit(jax.vmap(part, axis_name="d"))(
        *(split(a, PARTS) for a in (x, z, WEIGHT))
    )
    whole = jax.tree.map(lambda a: a.reshape(WEIGHT.shape), (dx, dz))
    gradients = (*whole, *jax.tree.map(lambda a: a.sum(0), tuple(shared)))
    assert_as_expected((value.sum(), gradients), form)


@one_or_two_inputs
def test_nested_axes_in_a_nested_tuple(form: Form) -> None:
    mapped: Callable[..., Any]
    mapped = functools.partial(results_of, form, axis_name=("i", ("j",)), save="mask")
    for name in ("j", "i"):
        mapped = jax.vmap(mapped, (0, 0, None, None), axis_name=name)

    def loss(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, mean, var = mapped(split(x, 4, 2), split(z, 4, 2), scale, bias)
        one = jax.tree.map(lambda v: v[0, 1], mean), jax.tree.map(lambda v: v[3, 0], var)
        return (y.reshape(WEIGHT.shape) * WEIGHT).sum() + of_statistics(*one)

    actual = jax.jit(jax.value_and_grad(loss, ALL))(*GIVEN[form])
    assert_as_expected(actual, form)


def test_one_of_two_mapped_axes() -> None:
    """Statistics are separate along the other axis."""

    def synchronised(x: Any) -> Any:
        return jax.vmap(
            lambda x: results_of("bn_relu", x, None, SCALE, BIAS, axis_name="j"), axis_name="j"
        )(x)

    y, mean, var = jax.jit(jax.vmap(synchronised, axis_name="i"))(split(X, 2, 4))
    for i, half in enumerate((X[:8], X[8:])):
        alone = jax_bnar.bn_relu(half, SCALE, BIAS)
        np.testing.assert_allclose(y[i].reshape(half.shape), alone.y, rtol=1e-5, atol=1e-5)
        for j in range(4):
            np.testing.assert_allclose(mean[i, j], alone.mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(var[i, j], alone.var, rtol=1e-5)


@one_or_two_inputs
def test_operand_that_is_not_mapped(form: Form) -> None:
    """With one x and several residuals or second inputs, its gradient sums over all its uses."""
    x, z, scale, bias = GIVEN[form]
    other = z if form == "bn_add_relu" else x[1]
    others = np.stack([other, 2 * other, -other])
    weights = np.stack([WEIGHT, -WEIGHT, 2 * WEIGHT])

    def with_other(first: Any, other: Any, *vectors: Any, **keywords: Any) -> Any:
        tensors = (first, other) if form == "bn_add_relu" else ((first, other), None)
        return results_of(form, *tensors, *vectors, **keywords)

    def loss(first: Any, others: Any, *vectors: Any) -> Any:
        y, mean, var = jax.vmap(
            lambda other: with_other(first, other, *vectors, axis_name="d"), axis_name="d"
        )(others)
        one = jax.tree.map(lambda v: v[0], mean), jax.tree.map(lambda v: v[2], var)
        return (y * weights).sum() + of_statistics(*one)

    def loop(first: Any, others: Any, *vectors: Any) -> Any:
        # Statistics of three equal parts are those of one; a second input has three parts.
        whole = jnp.concatenate([first] * 3)
        y, mean, var = with_other(whole, others.reshape(48, 3, 6), *vectors)
        return (y.reshape(3, 16, 3, 6) * weights).sum() + of_statistics(mean, var)

    given = jax.tree.leaves(x)[0], others, scale, bias
    actual, want = (jax.jit(jax.value_and_grad(f, ALL))(*given) for f in (loss, loop))
    assert relative_difference(actual, want) < 2e-6


def test_operand_that_does_not_vary() -> None:
    """The same with shard_map: x is replicated, and JAX knows that."""
    mesh = make_mesh("auto", d=PARTS)
    mapped = jax.shard_map(
        functools.partial(results_of, "bn_relu", axis_name="d"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
    )
    actual = jax.jit(jax.value_and_grad(lambda *given: total(*mapped(*given)), ALL))(
        X, Z, SCALE, BIAS
    )
    assert_as_expected(actual, "bn_relu")


@one_or_two_inputs
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 4, 6], [0, 2, 3, 5], [7]]])
def test_groups_of_indices(form: Form, groups: list[list[int]]) -> None:
    """Groups may differ in size; values and gradients are weighted by their counts."""
    mesh = make_mesh("auto", d=PARTS)

    def body(*given: Any) -> Any:
        y, *statistics = results_of(form, *given, axis_name="d", axis_index_groups=groups)
        return y, *jax.tree.map(lambda v: v[None], tuple(statistics))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("d"), P("d"), P(), P()),
        out_specs=P("d"),
        check_vma=False,
    )

    def loss(*given: Any) -> Any:
        y, mean, var = mapped(*given)
        of_groups = [
            (jax.tree.map(lambda v, i=g[0]: v[i], mean), jax.tree.map(lambda v, i=g[-1]: v[i], var))
            for g in groups
        ]
        return (y * WEIGHT).sum() + sum(of_statistics(*each) for each in of_groups)

    def by_hand(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        value = jnp.zeros((), np.float32)
        for group in groups:
            rows = np.concatenate([np.arange(2 * i, 2 * i + 2) for i in group])
            own_x, own_z = jax.tree.map(lambda a, rows=rows: a[rows], (x, z))
            value += total(*results_of(form, own_x, own_z, scale, bias), weight=WEIGHT[rows])
        return value

    actual, want = (jax.jit(jax.value_and_grad(f, ALL))(*GIVEN[form]) for f in (loss, by_hand))
    assert relative_difference(actual, want) < 2e-6


@checks
def test_without_axis_name_statistics_are_local(check_vma: bool) -> None:
    mesh = make_mesh("auto", d=PARTS)
    mapped = jax.shard_map(
        lambda x: jax_bnar.bn_relu(x, SCALE, BIAS).mean[None],
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(mapped(X), split(X, PARTS).mean((1, 2)), rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(mapped(X)[0], X.mean((0, 1)), rtol=1e-3)


def test_far_away_mean() -> None:
    x = operands(Case((64, 8, 6), ratio=1e4)).x
    _, _, var = jax.jit(
        jax.vmap(lambda x: results_of("bn_relu", x, None, None, None, axis_name="d"), axis_name="d")
    )(split(x, PARTS))
    exact = x.astype(np.float64).var((0, 1))
    assert np.abs(np.asarray(var) / exact - 1).max() < 1e-3


@checks
@one_or_two_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
def test_collectives_and_calls(check_vma: bool, form: Form, save: Save) -> None:
    """There is one all-reduce forward and one backward, and the halves of the kernels."""
    mesh = make_mesh("auto", d=PARTS)
    mapped = jax.shard_map(
        functools.partial(results_of, form, axis_name="d", save=save, implementation="ffi"),
        mesh=mesh,
        in_specs=(P("d"), P("d"), P(), P()),
        out_specs=(P("d"), P(), P()),
        check_vma=check_vma,
    )
    x, z, scale, bias = GIVEN[form]
    inputs = inputs_of(form)

    def step(x: Any, z: Any, dy: Any, dstatistics: Any) -> Any:
        (y, *_), vjp = jax.vjp(lambda x, z: mapped(x, z, scale, bias), x, z)
        return y, vjp((dy, *dstatistics))

    given = x, z, X, (bias, bias)
    # Without check_vma each device has cotangents of the statistics, which are reduced too.
    backward = (2 if check_vma else 4) * inputs * 6
    assert collectives(step, *given) == [
        [Collective("all-reduce", "f64", (1, 2 * inputs * 6))],
        [Collective("all-reduce", "f32", (1, backward))],
    ]
    assert hlo_calls(step, *given) == {
        "jax_bnar_statistics_v1": inputs,
        **{f"jax_bnar_{name}_v1": count for name, count in later_halves(form).items()},
    }


def later_halves(form: Form) -> dict[str, int]:
    """The operations after the statistics."""
    names = ("normalise", "backward_reduce", "backward_apply")
    return {operation_of(form, name): 1 for name in names}


@one_or_two_inputs
def test_vmap_folds_into_one_call_each_way(form: Form) -> None:
    """The examples lie in one array, so nothing is merged: the call is that of the whole batch."""
    mapped = jax.vmap(
        functools.partial(results_of, form, axis_name="d"), (0, 0, None, None), axis_name="d"
    )
    expected = {operation_of(form, name): 1 for name in ("forward", "backward")}
    assert ours(through(mapped), *GIVEN[form]) == expected


@one_or_two_inputs
def test_vmap_of_some_names_folds_within_each_device(form: Form) -> None:
    """Examples on each of several devices: one call of each half for all examples of a device."""
    mesh = make_mesh("auto", d=2)
    function = functools.partial(results_of, form, axis_name=("d", "i"))
    mapped = jax.shard_map(
        jax.vmap(function, (0, 0, None, None), (0, None, None), axis_name="i"),
        mesh=mesh,
        in_specs=(P("d"), P("d"), P(), P()),
        out_specs=(P("d"), P(), P()),
        # With check_vma, JAX has no psum over axes of shard_map and of vmap together.
        check_vma=False,
    )

    def loss(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, mean, var = mapped(split(x, PARTS), split(z, PARTS), scale, bias)
        return (y.reshape(WEIGHT.shape) * WEIGHT).sum() + of_statistics(mean, var)

    program = jax.value_and_grad(loss, ALL)
    assert ours(program, *GIVEN[form]) == {"statistics": inputs_of(form)} | later_halves(form)
    assert_as_expected(jax.jit(program)(*GIVEN[form]), form)


def test_vmap_that_also_maps_the_scale_runs_one_call_of_each_half() -> None:
    """Each example then has a scale of its own, which one call cannot apply."""

    def loss(x: Any, scale: Any) -> Any:
        mapped = jax.vmap(
            lambda x, scale: results_of("bn_relu", x, None, scale, BIAS, axis_name="d"),
            axis_name="d",
        )
        y, mean, var = mapped(split(x, PARTS), scale)
        return (y.reshape(WEIGHT.shape) * WEIGHT).sum() + of_statistics(mean[0], var[-1])

    scales = np.stack([SCALE] * PARTS)
    gradient = jax.value_and_grad(loss, (0, 1))
    assert ours(gradient, X, scales) == {"statistics": 1} | later_halves("bn_relu")
    value, (dx, dscale) = jax.jit(gradient)(X, scales)
    whole, (want_dx, _, want_dscale, _) = expected("bn_relu")
    assert relative_difference((value, dx, dscale.sum(0)), (whole, want_dx, want_dscale)) < 2e-6


def test_wrong_out_specs_are_refused() -> None:
    mesh = make_mesh("auto", d=PARTS)

    def mapped(out_specs: Any, **keywords: Any) -> Any:
        return jax.shard_map(
            lambda x: tuple(jax_bnar.bn_relu(x, SCALE, BIAS, **keywords)),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=out_specs,
        )(X)

    for out_specs, keywords in (((P("d"), P(), P("d")), {}), (P(), {"axis_name": "d"})):
        with pytest.raises(ValueError, match="can't be statically inferred"):
            mapped(out_specs, **keywords)
    mapped((P("d"), P(), P()), axis_name="d")


def test_refused() -> None:
    with pytest.raises(NameError, match=r"bn_relu: axis_name='nowhere' .* shard_map, pmap or vmap"):
        jax_bnar.bn_relu(X, SCALE, BIAS, axis_name="nowhere")
    two = "dual_bn_add_relu: axis_name='nowhere' does not name a mapped axis"
    with pytest.raises(NameError, match=two):
        jax_bnar.dual_bn_add_relu(X, X, None, None, None, None, axis_name="nowhere")
    pytest.importorskip("flax")
    layer = jax_bnar.flax_layers.BatchNorm(use_running_average=False, axis_name="nowhere")
    variables = layer.init(jax.random.key(0), X)  # which ignores the name, as in Flax
    for mask in (None, np.ones(X.shape, bool)):
        with pytest.raises(NameError, match=r"axis_name='nowhere' does not name a mapped axis"):
            layer.apply(variables, X, mask=mask, mutable=["batch_stats"])

    def mapped(groups: Any) -> Any:
        return jax.vmap(
            lambda x: jax_bnar.bn_relu(x, None, None, axis_name="d", axis_index_groups=groups).y,
            axis_name="d",
        )(split(X, PARTS))

    with pytest.raises(ValueError, match="the axis has 8 indices"):
        mapped([[0, 1], [2, 3]])
    # JAX has this limit for any collective over groups.
    with pytest.raises(
        NotImplementedError, match="does not support groups of the indices of a vmap"
    ):
        mapped([[0, 1, 2, 3], [4, 5, 6, 7]])


def test_groups_where_varying_axes_are_checked() -> None:
    """JAX's own error has no text."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    program = jax.shard_map(
        lambda x: jax_bnar.bn_relu(x, None, None, axis_name="d", axis_index_groups=groups).y,
        mesh=make_mesh("auto", d=PARTS),
        in_specs=P("d"),
        out_specs=P("d"),
    )
    with pytest.raises(NotImplementedError, match="pass check_vma=False"):
        program(X)


@pytest.mark.parametrize("names", [{"d"}, {"d", "c"}], ids=["left", "none left"])
def test_shard_map_over_some_axes_of_the_mesh(names: set[str]) -> None:
    """XLA cannot partition a kernel there, so it is pure JAX, or an error if "ffi" is requested."""
    mesh = make_mesh("auto", d=4, c=2)

    def mapped(implementation: Implementation) -> Any:
        return jax.jit(
            jax.shard_map(
                lambda x: (
                    jax_bnar.bn_relu(x, SCALE, BIAS, axis_name="d", implementation=implementation).y
                ),
                mesh=mesh,
                in_specs=P("d"),
                out_specs=P("d"),
                axis_names=names,
            )
        )

    alone = jax_bnar.bn_relu(X, SCALE, BIAS).y
    np.testing.assert_allclose(mapped(None)(X), alone, rtol=1e-5, atol=1e-5)
    if names == {"d"}:
        with pytest.raises(NotImplementedError, match=r"mesh axes \(c\) automatic"):
            mapped("ffi")(X)
    else:
        mapped("ffi")(X)
