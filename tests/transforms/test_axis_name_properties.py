"""Statistics over named axes against the formula with `lax.pmean`, mapped in the same way.

Devices that share statistics need not share x, z, scale or bias: each of these may or may not be
mapped over the axis. All derivatives of the formula are JAX's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FORMS, Form, by_input, call, inputs_of, names_of, one_or_two_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from oracle import each_input
from property_tests import example_count
from sharding_tools import make_mesh, relative_difference
from tiers import slow_except

EPSILON = 1e-3
AXIS = "v"
Operator = Callable[..., tuple[Any, Any, Any]]
How = Literal["vmap", "pmap", "check_vma", "no check_vma"]
HOW: tuple[How, ...] = ("vmap", "pmap", "check_vma", "no check_vma")


def ours(form: Form, *given: Any, **keywords: Any) -> Any:
    return tuple(call(form, *by_input(form, *given), epsilon=EPSILON, **keywords))


def formula(form: Form, *given: Any, axis_name: Any, axis_index_groups: Any = None) -> Any:
    """What a user would write; the groups in `axis_index_groups` may differ in size."""
    if axis_index_groups is None:
        size = jax.lax.axis_size(axis_name)
    else:
        sizes = {index: len(group) for group in axis_index_groups for index in group}
        table = jnp.asarray([float(sizes[index]) for index in range(len(sizes))])
        size = table[jax.lax.axis_index(axis_name)]

    def average(values: Any) -> Any:
        total = jax.lax.psum(values.mean(0), axis_name, axis_index_groups=axis_index_groups)
        return total / size

    def normalised(x: Any, scale: Any, bias: Any) -> Any:
        mean = average(x)
        centred = x - jnp.broadcast_to(mean, x.shape)
        var = average(jnp.square(centred))
        y = centred * jnp.broadcast_to(jax.lax.rsqrt(var + EPSILON), x.shape)
        if scale is not None:
            y = y * jnp.broadcast_to(scale, x.shape)
        if bias is not None:
            y = y + jnp.broadcast_to(bias, x.shape)
        return y, mean, var

    x, z, scale, bias = by_input(form, *given)
    each = [normalised(*own) for own in each_input(x, scale, bias)]
    ys, mean, var = zip(*each, strict=True)
    y = functools.reduce(jnp.add, ys)
    if form == "bn_add_relu":
        y = y + z
    if inputs_of(form) == 1:
        (mean,), (var,) = mean, var
    return y if form == "batch_norm" else jax.nn.relu(y), mean, var


def of_every_device(
    how: How, function: Callable[..., Any], is_mapped: Sequence[bool], size: int
) -> Callable[..., Any]:
    """The results of `function` on every device (or example), stacked along a first axis."""
    axes = tuple(0 if each else None for each in is_mapped)
    if how == "vmap":
        return jax.vmap(function, axes, axis_name=AXIS, axis_size=size)
    if how == "pmap":
        return jax.pmap(function, AXIS, in_axes=axes, devices=jax.devices()[:size])

    def on_one_device(*given: Any) -> Any:
        own = [a[0] if each else a for a, each in zip(given, is_mapped, strict=True)]
        return jax.tree.map(lambda result: result[None], function(*own))

    return jax.shard_map(
        on_one_device,
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:size]), (AXIS,)),
        in_specs=tuple(P(AXIS) if each else P() for each in is_mapped),
        out_specs=P(AXIS),
        check_vma=how == "check_vma",
    )


def random_operands(is_mapped: Sequence[bool], size: int, seed: int) -> list[Any]:
    """Two tensors, then vectors."""
    random = np.random.default_rng(seed)
    shapes = [(5, 3)] * 2 + [(3,)] * (len(is_mapped) - 2)
    return [
        jnp.asarray(random.standard_normal((size, *shape) if each else shape))
        for shape, each in zip(shapes, is_mapped, strict=True)
    ]


def loss_of(results: Any, seed: int) -> Any:
    """A loss that depends on all of y, mean and var, and differently on each device."""
    random = np.random.default_rng(seed)
    total = jnp.zeros(())
    for result in jax.tree.leaves(results):
        total = total + (jnp.asarray(random.standard_normal(result.shape)) * result**2).sum()
    return total


def differentiated_around(
    operator: Operator, how: How, is_mapped: Sequence[bool], size: int, argnums: Any
) -> Callable[..., Any]:
    """Results, and gradients of a loss that depends on the results of all devices."""
    mapped = of_every_device(how, operator, is_mapped, size)

    def loss(*given: Any) -> Any:
        results = mapped(*given)
        return loss_of(results, 1), results

    return jax.value_and_grad(loss, argnums, has_aux=True)


def differentiated_inside(
    operator: Operator, how: How, is_mapped: Sequence[bool], size: int, argnums: Any
) -> Callable[..., Any]:
    """Each device differentiates its own loss."""

    def on_one_device(*given: Any) -> Any:
        def loss(*given: Any) -> Any:
            results = operator(*given)
            own = loss_of(results, 1)
            # JAX cannot differentiate a loss that varies between devices which share an operand.
            return (jax.lax.psum(own, AXIS) if how == "check_vma" else own), results

        return jax.value_and_grad(loss, argnums, has_aux=True)(*given)

    return of_every_device(how, on_one_device, is_mapped, size)


def product_with_hessian(
    operator: Operator, how: How, is_mapped: Sequence[bool], size: int, argnums: Any
) -> Callable[..., Any]:
    """A Hessian-vector product, forward mode over reverse mode, around the map."""
    mapped = of_every_device(how, operator, is_mapped, size)

    def loss(*given: Any) -> Any:
        return loss_of(mapped(*given), 1)

    def product(*given: Any) -> Any:
        random = np.random.default_rng(7)
        moved = tuple(jnp.asarray(random.standard_normal(a.shape)) for a in given)
        return jax.jvp(jax.grad(loss, argnums), given, moved)

    return product


DERIVATIVES = {
    "around": differentiated_around,
    "inside": differentiated_inside,
    "hessian": product_with_hessian,
}


def check(
    derivative: str,
    how: How,
    form: Form,
    is_mapped: Sequence[bool],
    *,
    size: int = 4,
    seed: int = 0,
    groups: Any = None,
    **keywords: Any,
) -> None:
    operands = random_operands(is_mapped, size, seed)
    is_read = [name != "z" or form == "bn_add_relu" for name in names_of(form)]
    argnums = tuple(np.flatnonzero(is_read).tolist())
    where: dict[str, Any] = {"axis_name": AXIS, "axis_index_groups": groups}
    program = functools.partial(
        DERIVATIVES[derivative], how=how, is_mapped=is_mapped, size=size, argnums=argnums
    )
    actual = jax.jit(program(functools.partial(ours, form, **where, **keywords)))(*operands)
    expected = jax.jit(program(functools.partial(formula, form, **where)))(*operands)
    assert relative_difference(actual, expected) < 1e-9


@st.composite
def forms_and_mapped_operands(draw: st.DrawFn, inputs: int) -> dict[str, Any]:
    forms: list[Form] = [form for form in FORMS if inputs_of(form) == inputs]
    form: Form = draw(st.sampled_from(forms))
    # The first x is always mapped: statistics over devices that have the same are not interesting.
    others = [draw(st.booleans()) for _ in names_of(form)[1:]]
    return {"form": form, "is_mapped": (True, *others)}


@pytest.mark.parametrize("inputs", slow_except({1}, [1, 2]))
@settings(max_examples=example_count(12))
@given(
    data=st.data(),
    derivative=st.sampled_from(sorted(DERIVATIVES)),
    how=st.sampled_from(HOW),
    size=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
    save=st.sampled_from(["y", "mask"]),
    implementation=st.sampled_from(["ffi", "xla"]),
)
def test_any_operand_mapped_or_not(inputs: int, data: st.DataObject, **drawn: Any) -> None:
    check(**data.draw(forms_and_mapped_operands(inputs)), **drawn)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("derivative", sorted(DERIVATIVES))
@one_or_two_inputs
def test_every_device_has_a_scale_of_its_own(form: Form, derivative: str, how: How) -> None:
    check(derivative, how, form, (True,) * len(names_of(form)))


@pytest.mark.parametrize("mapped", [0, 1])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("derivative", sorted(DERIVATIVES))
def test_one_of_two_inputs_is_mapped(derivative: str, how: How, mapped: int) -> None:
    """The statistics of the other one are those of each device, which come from the same merge."""
    is_mapped = tuple(i == mapped for i in range(6))
    check(derivative, how, "dual_bn_add_relu", is_mapped, save="mask")


@pytest.mark.parametrize("groups", [[[0, 3], [1, 2]], [[0], [1, 2, 3]]], ids=["equal", "unequal"])
@pytest.mark.parametrize("how", ["pmap", "no check_vma"])
@pytest.mark.parametrize(
    ("derivative", "form"),
    [
        *((derivative, "bn_relu") for derivative in sorted(DERIVATIVES)),
        ("around", "dual_bn_add_relu"),
    ],
)
def test_groups_of_devices(derivative: str, form: Form, how: How, groups: list[list[int]]) -> None:
    check(derivative, how, form, (True,) * len(names_of(form)), groups=groups)


@pytest.mark.parametrize("is_mapped", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_nested_names(is_mapped: tuple[bool, bool], implementation: str) -> None:
    """The scale is mapped over one or both of the axes that the statistics span."""
    random = np.random.default_rng(3)
    x = jnp.asarray(random.standard_normal((2, 3, 5, 3)))
    scale = jnp.asarray(random.standard_normal((*np.array([2, 3])[list(is_mapped)].tolist(), 3)))
    outer, inner = (0 if each else None for each in is_mapped)

    def total(operator: Operator) -> Any:
        def loss(x: Any, scale: Any) -> Any:
            results = jax.vmap(
                jax.vmap(
                    lambda x, scale: operator(x, None, scale, None, axis_name=("o", "i")),
                    (0, inner),
                    axis_name="i",
                    out_axes=(0, None, None),
                ),
                (0, outer),
                axis_name="o",
                out_axes=(0, None, None),
            )(x, scale)
            return loss_of(results, 1)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, scale)

    actual = total(functools.partial(ours, "bn_relu", implementation=implementation))
    assert relative_difference(actual, total(functools.partial(formula, "bn_relu"))) < 1e-9


@pytest.mark.parametrize("mesh_kind", ["auto", "explicit"])
def test_under_jit_over_a_mesh(mesh_kind: Any) -> None:
    """Each example has its own scale, and its batch is sharded over several devices."""
    mesh = make_mesh(mesh_kind, d=4)
    random = np.random.default_rng(4)
    x = jnp.asarray(random.standard_normal((2, 8, 3)))
    scale, bias = (jnp.asarray(random.standard_normal((2, 3))) for _ in range(2))

    def gradients(operator: Operator) -> Any:
        def loss(x: Any, scale: Any, bias: Any) -> Any:
            results = jax.vmap(
                lambda *given: operator(given[0], None, *given[1:], axis_name=AXIS),
                axis_name=AXIS,
                out_axes=(0, None, None),
            )(x, scale, bias)
            return loss_of(results, 1)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    expected = gradients(functools.partial(formula, "bn_relu"))(x, scale, bias)
    sharding = jax.sharding.NamedSharding(mesh, P(None, "d"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding)
        try:
            gradients(functools.partial(formula, "bn_relu")).lower(placed, scale, bias)
        except ValueError as error:
            # jax 0.12.0.1 keeps the axis that psum has reduced in the sharding of the result.
            pytest.skip(f"JAX cannot map the formula on this mesh: {error}")
        actual = gradients(functools.partial(ours, "bn_relu"))(placed, scale, bias)
    assert relative_difference(actual, expected) < 1e-9


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("form", ["bn_relu", "dual_bn_add_relu"])
def test_statistics_are_one_value_for_all_examples(form: Form, implementation: str) -> None:
    """`out_axes=None` works, as in Flax's documentation on mapping a BatchNorm over examples."""
    is_mapped = (True, inputs_of(form) == 2) + (False,) * (len(names_of(form)) - 2)
    operands = random_operands(is_mapped, 4, 0)
    tensors, vectors = operands[: 2 if is_mapped[1] else 1], operands[2:]
    absent = () if is_mapped[1] else (None,)

    def one(*tensors: Any) -> Any:
        keywords: Any = {"axis_name": AXIS, "implementation": implementation}
        return ours(form, *tensors, *absent, *vectors, **keywords)

    def with_tangents(*tensors: Any) -> Any:
        return jax.jvp(one, tensors, tensors)

    axes = (0, None, None)
    y, mean, var = jax.jit(jax.vmap(one, out_axes=axes, axis_name=AXIS))(*tensors)
    whole = ours(form, *(x.reshape(20, 3) for x in tensors), *absent, *vectors)
    assert relative_difference((y.reshape(20, 3), mean, var), whole) < 1e-12
    dots = jax.jit(jax.vmap(with_tangents, out_axes=(axes, axes), axis_name=AXIS))(*tensors)[1]
    assert {dot.shape for dot in jax.tree.leaves(dots[1:])} == {(3,)}
