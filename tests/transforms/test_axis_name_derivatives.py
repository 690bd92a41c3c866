"""Forward mode and second derivatives with statistics over named axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, operands, unfused
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import ours
from trees import assert_trees_close

import jax_bnar

pytestmark = pytest.mark.quick

CASE = Case((8, 3, 2), dtype="float64", scale_dtype="float64", bias_dtype="float64", seed=3)
WEIGHT = jnp.asarray(np.random.default_rng(1).standard_normal((8, 3, 2)))
EVERYTHING = (0, 1, 2, 3)


def local(x: Any, z: Any, scale: Any, bias: Any, weight: Any) -> Any:
    y, mean, var = jax_bnar.bn_add_relu(x, z, scale, bias, axis_name="data", save="mask")
    # All devices have the same statistics, so their term counts only once.
    return jax.lax.psum((y**2 * weight).sum(), "data") + (mean * var).sum()


def whole(*given: Any) -> Any:
    y, mean, var = unfused(*given)
    return (y**2 * WEIGHT).sum() + (mean * var).sum()


def mapped(check_vma: bool) -> Any:
    function: Any = jax.shard_map(
        local,
        mesh=Mesh(np.array(jax.devices()[:4]), ("data",)),
        in_specs=(P("data"), P("data"), P(), P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return lambda *given: function(*given, WEIGHT)


def examples(*given: Any) -> Any:
    """vmap(axis_name=...) over pieces of the batch, instead of devices."""

    def split(array: Any) -> Any:
        return array.reshape(4, 2, *array.shape[1:])

    x, z, scale, bias = given
    function = jax.vmap(local, (0, 0, None, None, 0), axis_name="data")
    return function(split(x), split(z), scale, bias, split(WEIGHT)).mean()


PROGRAMS = {"vma": mapped(True), "no-vma": mapped(False), "vmap": examples}
programs = pytest.mark.parametrize("program", PROGRAMS)


def given_and_tangents() -> tuple[Any, Any]:
    given = tuple(map(jnp.asarray, operands(CASE)))
    random = np.random.default_rng(5)
    return given, tuple(jnp.asarray(random.standard_normal(a.shape)) for a in given)


@programs
def test_jvp(program: str) -> None:
    given, moved = given_and_tangents()
    actual = jax.jit(lambda: jax.jvp(PROGRAMS[program], given, moved))()
    assert_trees_close(actual, jax.jvp(whole, given, moved), tolerance=1e-9)


@programs
def test_hessian_vector_product(program: str) -> None:
    """Forward mode over reverse mode."""
    given, moved = given_and_tangents()

    def product(function: Any) -> Any:
        return jax.jit(lambda: jax.jvp(jax.grad(function, EVERYTHING), given, moved))()

    assert_trees_close(product(PROGRAMS[program]), product(whole), tolerance=1e-8)


def test_first_order_runs_the_halves_once() -> None:
    given, _ = given_and_tangents()
    gradient = jax.grad(PROGRAMS["vma"], EVERYTHING)
    names = ("statistics", "normalise", "backward_reduce", "backward_apply")
    assert ours(gradient, *given) == dict.fromkeys(names, 1)
