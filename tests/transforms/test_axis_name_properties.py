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
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from property_tests import example_count
from sharding_tools import make_mesh, relative_difference

import jax_bnar

EPSILON = 1e-3
NAMES = ("x", "z", "scale", "bias")
AXIS = "v"
Operator = Callable[..., tuple[Any, Any, Any]]
How = Literal["vmap", "pmap", "check_vma", "no check_vma"]
HOW: tuple[How, ...] = ("vmap", "pmap", "check_vma", "no check_vma")


def ours(form: str, x: Any, z: Any, scale: Any, bias: Any, **keywords: Any) -> Any:
    tensors = (x, z) if form == "bn_add_relu" else (x,)
    operator = getattr(jax_bnar, form)
    return tuple(operator(*tensors, scale, bias, epsilon=EPSILON, **keywords))


def formula(
    form: str,
    x: Any,
    z: Any,
    scale: Any,
    bias: Any,
    *,
    axis_name: Any,
    axis_index_groups: Any = None,
) -> Any:
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

    mean = average(x)
    centred = x - jnp.broadcast_to(mean, x.shape)
    var = average(jnp.square(centred))
    y = centred * jnp.broadcast_to(jax.lax.rsqrt(var + EPSILON), x.shape)
    if scale is not None:
        y = y * jnp.broadcast_to(scale, x.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias, x.shape)
    if form == "bn_add_relu":
        y = y + z
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
    random = np.random.default_rng(seed)
    shapes = ((5, 3), (5, 3), (3,), (3,))
    return [
        jnp.asarray(random.standard_normal((size, *shape) if each else shape))
        for shape, each in zip(shapes, is_mapped, strict=True)
    ]


def loss_of(results: Any, seed: int) -> Any:
    """A loss that depends on all of y, mean and var, and differently on each device."""
    random = np.random.default_rng(seed)
    total = jnp.zeros(())
    for result in results:
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
    form: str,
    is_mapped: Sequence[bool],
    *,
    size: int = 4,
    seed: int = 0,
    groups: Any = None,
    **keywords: Any,
) -> None:
    operands = random_operands(is_mapped, size, seed)
    argnums = tuple(i for i, name in enumerate(NAMES) if name != "z" or form == "bn_add_relu")
    where: dict[str, Any] = {"axis_name": AXIS, "axis_index_groups": groups}
    program = functools.partial(
        DERIVATIVES[derivative], how=how, is_mapped=is_mapped, size=size, argnums=argnums
    )
    actual = jax.jit(program(functools.partial(ours, form, **where, **keywords)))(*operands)
    expected = jax.jit(program(functools.partial(formula, form, **where)))(*operands)
    assert relative_difference(actual, expected) < 1e-9


@settings(max_examples=example_count(20))
@given(
    derivative=st.sampled_from(sorted(DERIVATIVES)),
    how=st.sampled_from(HOW),
    form=st.sampled_from(["bn_add_relu", "bn_relu", "batch_norm"]),
    # x is always mapped: statistics over devices that have the same x are not interesting.
    is_mapped=st.tuples(st.just(True), *[st.booleans()] * 3),
    size=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
    save=st.sampled_from(["y", "mask"]),
    implementation=st.sampled_from(["ffi", "xla"]),
)
def test_any_operand_mapped_or_not(**drawn: Any) -> None:
    check(**drawn)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("derivative", sorted(DERIVATIVES))
def test_every_device_has_a_scale_of_its_own(derivative: str, how: How) -> None:
    check(derivative, how, "bn_add_relu", (True,) * 4)


@pytest.mark.parametrize("groups", [[[0, 3], [1, 2]], [[0], [1, 2, 3]]], ids=["equal", "unequal"])
@pytest.mark.parametrize("how", ["pmap", "no check_vma"])
@pytest.mark.parametrize("derivative", sorted(DERIVATIVES))
def test_groups_of_devices(derivative: str, how: How, groups: list[list[int]]) -> None:
    check(derivative, how, "bn_relu", (True,) * 4, groups=groups)


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
def test_statistics_are_one_value_for_all_examples(implementation: str) -> None:
    """`out_axes=None` works, as in Flax's documentation on mapping a BatchNorm over examples."""
    x, _, scale, bias = random_operands((True, False, False, False), 4, 0)

    def one(x: Any) -> Any:
        return ours("bn_relu", x, None, scale, bias, axis_name=AXIS, implementation=implementation)

    def with_tangents(x: Any) -> Any:
        return jax.jvp(one, (x,), (x,))

    axes = (0, None, None)
    y, mean, var = jax.vmap(one, out_axes=axes, axis_name=AXIS)(x)
    whole = ours("bn_relu", x.reshape(20, 3), None, scale, bias)
    assert relative_difference((y.reshape(20, 3), mean, var), whole) < 1e-12
    _, (_, mean_dot, var_dot) = jax.vmap(with_tangents, out_axes=(axes, axes), axis_name=AXIS)(x)
    assert mean_dot.shape == var_dot.shape == (3,)
