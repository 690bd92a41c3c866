"""The Linen layer with arrays that are sharded over Explicit mesh axes, compared with Flax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_tools import some_variables
from jax.sharding import PartitionSpec as P
from sharding_tools import collectives, make_mesh, put, relative_difference

import jax_bnar
from jax_bnar.flax_layers import BatchNorm

_RANDOM = np.random.default_rng(5)
X, WEIGHT = (jnp.asarray(_RANDOM.standard_normal((4, 8, 4, 8)), np.float32) for _ in range(2))


def step(kind: type[nn.Module], *, mapped: bool = False, **fields: Any) -> Any:
    """A function that returns y, the new running statistics, and the gradient of x."""

    def apply(variables: Any, x: Any) -> Any:
        return kind(**fields).apply(variables, x, mutable=["batch_stats"])

    if mapped:
        apply = jax.vmap(apply, in_axes=(None, 0), axis_name=fields.get("axis_name"))

    def function(variables: Any, x: Any, weight: Any) -> Any:
        y, vjp, updated = jax.vjp(lambda x: apply(variables, x), x, has_aux=True)
        return y, updated, vjp(weight)

    return function


def agrees_with_flax(spec: P, *, mapped: bool = False, **fields: Any) -> None:
    mesh = make_mesh("explicit", d=2, m=2)
    own = {name: value for name, value in fields.items() if name != "use_running_average"}
    variables = some_variables(BatchNorm(**own), X[0] if mapped else X)
    want = step(nn.BatchNorm, mapped=mapped, **fields)(variables, X, WEIGHT)
    placed = jax.tree.map(lambda array: put(array, mesh, P()), variables)
    given = placed, put(X, mesh, spec), put(WEIGHT, mesh, spec)
    ours = step(BatchNorm, mapped=mapped, **fields)
    with jax.set_mesh(mesh):
        for function in (ours, jax.jit(ours)):
            got = function(*given)
            assert relative_difference(got, want) < 2e-6
            assert jax.typeof(got[0]).sharding.spec == given[1].sharding.spec


@pytest.mark.parametrize("use_running_average", [False, True])
@pytest.mark.parametrize(
    ("axis", "spec"),
    [
        ((2, 3), P("d", None, None, "m")),
        ((0, 3), P(None, None, None, "m")),
        ((0, 1), P("d", "m", None, None)),
        ((1, 3), P("d", None, None, "m")),
    ],
)
def test_several_feature_axes(axis: Any, spec: P, use_running_average: bool) -> None:
    """JAX merges no axes of which a later one is sharded."""
    agrees_with_flax(spec, axis=axis, use_running_average=use_running_average)


@pytest.mark.parametrize(("axis", "use_running_average"), [((1, 2), False), ((0, 1, 2), True)])
def test_several_feature_axes_under_vmap(axis: Any, use_running_average: bool) -> None:
    """Nor does it both merge axes and add one, if another one is sharded, here the mapped one."""
    spec = P("d", None, None, None)
    agrees_with_flax(spec, mapped=True, axis=axis, use_running_average=use_running_average)


@pytest.mark.parametrize("spec", [P("d", None, None, None), P("d", "m", None, None)])
def test_statistics_over_a_sharded_mapped_axis(spec: P) -> None:
    agrees_with_flax(spec, mapped=True, axis_name="examples", use_running_average=False)


def test_a_sharded_mapped_axis_is_not_gathered() -> None:
    mesh = make_mesh("explicit", d=8)
    x = jnp.asarray(_RANDOM.standard_normal((8, 4, 16)), np.float32)
    vector = put(jnp.ones(16, np.float32), mesh, P())

    def norm(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_relu(x, vector, vector, axis_name="examples")[0]

    @jax.jit
    def gradient(x: jax.Array) -> jax.Array:
        y, vjp = jax.vjp(jax.vmap(norm, axis_name="examples"), x)
        return vjp(y)[0]

    with jax.set_mesh(mesh):
        found = collectives(gradient, put(x, mesh, P("d")))
    assert {each.opcode for operation in found for each in operation} == {"all-reduce"}


@pytest.mark.parametrize("rows", [8, 1])
def test_mask_under_vmap(rows: int) -> None:
    mesh = make_mesh("explicit", d=4)
    mask = jnp.asarray(_RANDOM.random((4, 8, 4, rows)) < 0.7)

    def statistics(x: jax.Array, mask: jax.Array) -> Any:
        return jax_bnar.batch_statistics(x, where=mask)

    function = jax.jit(jax.vmap(statistics))
    want = function(X, mask)
    with jax.set_mesh(mesh):
        got = function(put(X, mesh, P("d")), put(mask, mesh, P("d")))
    assert relative_difference(got, want) < 2e-6
