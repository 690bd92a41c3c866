"""The Linen layer on several devices: under jit, over a named axis, and with a mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_tools import some_variables
from jax.sharding import PartitionSpec as P
from programs import hlo_calls
from sharding_tools import collectives, make_mesh, put, relative_difference, use_mesh

from jax_bnar.flax_layers import BatchNorm

pytestmark = pytest.mark.quick

SHAPE = (16, 4, 8)
_RANDOM = np.random.default_rng(3)
X, WEIGHT = (jnp.asarray(_RANDOM.standard_normal(SHAPE), np.float32) for _ in range(2))
# A padded last batch: the last device has no valid row, and the one before it has one of two.
VALID = (np.arange(16) < 13)[:, None, None]


def step(layer: nn.Module, *, residual: bool = False) -> Any:
    """A function that returns the loss, the new running statistics, and the gradients."""

    def function(variables: Any, x: Any, weight: Any, mask: Any = None) -> Any:
        def loss(params: Any, x: Any) -> Any:
            more = {"residual": x[..., ::-1]} if residual else {}
            y, updated = layer.apply(
                {**variables, "params": params},
                x,
                use_running_average=False,
                mask=mask,
                mutable=["batch_stats"],
                **more,
            )
            return (y * weight).sum(), updated

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(variables["params"], x)

    return function


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_under_jit(kind: Any) -> None:
    layer = BatchNorm(activation="relu", unbiased_running_var=True)
    variables, function = some_variables(layer, X), jax.jit(step(layer, residual=True))
    want = function(variables, X, WEIGHT)
    mesh = make_mesh(kind, d=8)
    placed = jax.tree.map(lambda a: put(a, mesh, P()), variables)
    given = placed, put(X, mesh, P("d")), put(WEIGHT, mesh, P("d"))
    with jax.set_mesh(mesh):
        assert relative_difference(function(*given), want) < 2e-6
        found = collectives(function, *given)
    assert {each.opcode for operation in found for each in operation} == {"all-reduce"}
    # One is ours forward; the other is ours backward, combined with that of the loss.
    assert len(found) == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_name_runs_the_kernels(check_vma: bool) -> None:
    whole = BatchNorm(activation="relu", unbiased_running_var=True)
    layer = BatchNorm(
        activation="relu", unbiased_running_var=True, axis_name="d", implementation="ffi"
    )
    variables = some_variables(layer, X)
    (_, want), _ = step(whole)(variables, X, WEIGHT)
    mapped = jax.jit(
        jax.shard_map(
            lambda variables, x: layer.apply(
                variables, x, use_running_average=False, mutable=["batch_stats"]
            ),
            mesh=make_mesh("auto", d=8),
            in_specs=(P(), P("d")),
            out_specs=(P("d"), P()),
            check_vma=check_vma,
        )
    )
    _, actual = mapped(variables, X)
    assert relative_difference(actual, want) < 2e-6
    assert hlo_calls(mapped, variables, X) == {
        "jax_bnar_statistics_v1": 1,
        "jax_bnar_normalise_v1": 1,
    }


@pytest.mark.parametrize("how", ["jit", "jit explicit", "shard_map", "vmap"])
def test_padded_last_batch(how: str) -> None:
    """Padding has no effect at all, although devices have 2, 1 or 0 valid rows."""
    layer = BatchNorm(
        axis_name="d" if how in ("shard_map", "vmap") else None, unbiased_running_var=True
    )
    variables = some_variables(layer, X)
    weight = jnp.where(VALID, WEIGHT, 0)
    valid = BatchNorm(unbiased_running_var=True)
    (value, updated), (dparams, dx) = step(valid)(variables, X[:13], WEIGHT[:13])
    dx = np.concatenate([dx, np.zeros_like(X[13:])])

    def apply(params: Any, x: Any, mask: Any) -> Any:
        return layer.apply(
            {**variables, "params": params},
            x,
            use_running_average=False,
            mask=mask,
            mutable=["batch_stats"],
        )

    mesh = make_mesh("explicit" if how == "jit explicit" else "auto", d=8)
    arrays: tuple[Any, ...] = X, VALID
    mapped: Any
    if how in ("jit", "jit explicit"):
        arrays = tuple(put(a, mesh, P("d")) for a in arrays)
        mapped = apply
    elif how == "shard_map":
        mapped = jax.shard_map(
            apply, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=(P("d"), P())
        )
    else:

        def vmapped(params: Any, x: Any, mask: Any) -> Any:
            x, mask = (a.reshape(8, 2, *a.shape[1:]) for a in (x, mask))
            y, updated = jax.vmap(apply, (None, 0, 0), axis_name="d")(params, x, mask)
            return y.reshape(SHAPE), jax.tree.map(lambda s: s[0], updated)

        mapped = vmapped

    def loss(params: Any, x: Any, mask: Any) -> Any:
        y, updated = mapped(params, x, mask)
        return (y * weight).sum(), updated

    both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    with use_mesh(mesh):
        actual = both(variables["params"], *arrays)
    assert relative_difference(actual, ((value, updated), (dparams, dx))) < 2e-6
