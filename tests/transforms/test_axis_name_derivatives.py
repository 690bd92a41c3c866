"""Forward mode and second derivatives with statistics over named axes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    FLOAT64,
    Case,
    Form,
    call,
    inputs_of,
    one_or_two_inputs,
    operands,
    operation_of,
    product_of_statistics,
    unfused,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import ours
from trees import assert_trees_close

pytestmark = pytest.mark.quick

WEIGHT = jnp.asarray(np.random.default_rng(1).standard_normal((8, 3, 2)))
EVERYTHING = (0, 1, 2, 3)


def local(form: Form, *given: Any) -> Any:
    *operands, weight = given
    y, mean, var = call(form, *operands, axis_name="data", save="mask")
    # All devices have the same statistics, so their term counts only once.
    return jax.lax.psum((y**2 * weight).sum(), "data") + product_of_statistics(mean, var)


def whole(*given: Any) -> Any:
    y, mean, var = unfused(*given)
    return (y**2 * WEIGHT).sum() + product_of_statistics(mean, var)


def mapped(form: Form, *, check_vma: bool, weight: Any = WEIGHT) -> Any:
    function: Any = jax.shard_map(
        functools.partial(local, form),
        mesh=Mesh(np.array(jax.devices()[:4]), ("data",)),
        in_specs=(P("data"), P("data"), P(), P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return lambda *given: function(*given, weight)


def examples(form: Form) -> Any:
    """vmap(axis_name=...) over pieces of the batch, instead of devices."""

    def split(tree: Any) -> Any:
        return jax.tree.map(lambda array: array.reshape(4, 2, *array.shape[1:]), tree)

    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        in_axes = (0, 0, None, None, 0)
        function: Any = jax.vmap(functools.partial(local, form), in_axes, axis_name="data")
        return function(split(x), split(z), scale, bias, split(WEIGHT)).mean()

    return program


PROGRAMS = {
    "vma": functools.partial(mapped, check_vma=True),
    "no-vma": functools.partial(mapped, check_vma=False),
    "vmap": examples,
}
programs = pytest.mark.parametrize("program", PROGRAMS)


def given_and_tangents(form: Form) -> tuple[Any, Any]:
    given = jax.tree.map(
        jnp.asarray, tuple(operands(Case((8, 3, 2), form=form, seed=3, **FLOAT64)))
    )
    random = np.random.default_rng(5)
    return given, jax.tree.map(lambda a: jnp.asarray(random.standard_normal(a.shape)), given)


@programs
@one_or_two_inputs
def test_jvp(program: str, form: Form) -> None:
    given, moved = given_and_tangents(form)
    actual = jax.jit(lambda: jax.jvp(PROGRAMS[program](form), given, moved))()
    assert_trees_close(actual, jax.jvp(whole, given, moved), tolerance=1e-9)


@programs
@one_or_two_inputs
def test_hessian_vector_product(program: str, form: Form) -> None:
    """Forward mode over reverse mode."""
    given, moved = given_and_tangents(form)

    def product(function: Any) -> Any:
        return jax.jit(lambda: jax.jvp(jax.grad(function, EVERYTHING), given, moved))()

    assert_trees_close(product(PROGRAMS[program](form)), product(whole), tolerance=1e-8)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@one_or_two_inputs
def test_hessian_vector_product_of_a_jitted_function_without_x64(
    check_vma: bool, form: Form
) -> None:
    """jax 0.12 differentiates such a function outside of the context in which it was traced.

    The statistics are merged in float64 in it, which is why x64 matters.
    """
    given, moved = jax.tree.map(lambda a: a.astype(np.float32), given_and_tangents(form))
    expected = jax.jvp(
        jax.grad(whole, EVERYTHING),
        *jax.tree.map(lambda a: a.astype(np.float64), (given, moved)),
    )
    with jax.enable_x64(False):
        function = mapped(form, check_vma=check_vma, weight=WEIGHT.astype(np.float32))
        actual = jax.jvp(jax.grad(jax.jit(function), EVERYTHING), given, moved)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(np.float32)}
    assert_trees_close(actual, expected, tolerance=1e-4)


@one_or_two_inputs
def test_first_order_runs_the_halves_once(form: Form) -> None:
    given, _ = given_and_tangents(form)
    gradient = jax.grad(PROGRAMS["vma"](form), EVERYTHING)
    names = ("normalise", "backward_reduce", "backward_apply")
    expected = {operation_of(form, name): 1 for name in names}
    assert ours(gradient, *given) == {"statistics": inputs_of(form)} | expected
