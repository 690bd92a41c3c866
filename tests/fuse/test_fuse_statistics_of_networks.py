"""`fuse` takes statistics of devices and of layers, and mutants of them compute the same."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_tools import array, assert_no_worse, assert_untouched, kernels, operators
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from property_tests import example_count
from statistics_programs import (
    AXES,
    SCALE,
    G,
    X,
    gate,
    gated,
    moments,
)
from test_fuse_mutations import ARGUMENTS as OF_MUTANTS
from test_fuse_mutations import BASES, MUTATIONS, mutant, require_equal

import jax_bnar
from jax_bnar._fuse import statistics_search

GROUPS = [[0, 2], [3, 1]]


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["whole", "groups"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_named_axes(groups: Any, check_vma: bool) -> None:
    """Statistics of all devices, or of groups of them, are one call with these names."""
    if groups is not None and check_vma:
        pytest.skip("JAX does not support axis_index_groups with check_vma")

    def layer(x: Any, g: Any) -> Any:
        mean = lax.pmean(x.mean(AXES, keepdims=True), "data", axis_index_groups=groups)
        squares = lax.pmean(
            jnp.square(x).mean(AXES, keepdims=True), "data", axis_index_groups=groups
        )
        return gated(x, g, mean, squares - mean * mean)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(
        layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    x, g = array((64, 8, 8, 8)), array((64, 8, 8, 8), 1)
    assert operators(program, x, g) == {"batch_statistics": 1}
    assert kernels(jax_bnar.fuse(program), x, g) == 1
    assert_no_worse(program, x, g)


def test_synchronised_statistics_that_are_read_as_varying() -> None:
    """With check_vma, the program declares the mean varying where it meets x, here once more."""

    def layer(x: Any, g: Any) -> Any:
        mean = lax.pmean(x.mean(AXES, keepdims=True), "data")
        squares = lax.pmean(jnp.square(x).mean(AXES, keepdims=True), "data")
        y = jax.nn.relu((x - mean) * lax.rsqrt(squares - mean * mean + 1e-3))
        return y + g * mean

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert operators(program, X, G) == {"bn_relu": 1}
    assert_no_worse(program, X, G)


def test_the_axis_of_a_vmap() -> None:
    def member(x: Any, g: Any) -> Any:
        mean = lax.pmean(x.mean((0, 1), keepdims=True), "batch")
        var = lax.pmean(jnp.square(x - mean).mean((0, 1), keepdims=True), "batch")
        return gated(x, g, mean, var)

    program = jax.vmap(member, axis_name="batch")
    assert operators(program, X, G) == {"batch_statistics": 1}
    assert_no_worse(program, X, G)


def test_local_variances_of_devices() -> None:
    """The mean of the devices' own variances is no variance, but each of those is one."""

    def layer(x: Any, g: Any) -> Any:
        mean, var = moments(x)
        return gated(x, g, lax.pmean(mean, "data"), lax.pmean(var, "data"))

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x, g = array((64, 8, 8, 8)), array((64, 8, 8, 8), 1)
    assert operators(program, x, g) == {"batch_statistics": 1}
    assert_no_worse(program, x, g)


def test_sharded_arrays() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x, g = (jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (X, G))
    given = jax.jit(jax_bnar.fuse(gate))(x, g, SCALE)
    np.testing.assert_allclose(given, gate(X, G, SCALE), rtol=1e-4, atol=1e-5)


def test_calls_stay_calls() -> None:
    """Statistics alone are not worth the inlining of a large jitted function."""

    @jax.jit
    def block(x: Any, mean: Any) -> Any:
        return jnp.sin(jnp.square(x - mean.reshape(1, 1, 1, -1)).mean(AXES)) @ jnp.eye(
            8, dtype=x.dtype
        )

    assert_untouched(lambda x: block(x, x.mean(AXES)), X)


class Gated(nn.Module):
    """A layer of Linen with running statistics and a gate inside of its affine."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        running = self.variable("batch_stats", "var", jnp.ones, (x.shape[-1],), x.dtype)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), x.dtype)
        x = nn.Conv(16, (3, 3))(x)
        g = nn.Dense(16)(x)
        mean, var = moments(x)
        running.value = 0.5 * running.value + 0.5 * var.reshape(-1)[: x.shape[-1] // 2]
        gated = lax.rsqrt(var + 1e-5) * jnp.repeat(scale, 2).reshape(1, 1, 1, -1) * nn.sigmoid(g)
        return nn.relu((x - mean) * gated)


def test_a_linen_module() -> None:
    variables = Gated().init(jax.random.key(0), X)

    def loss(params: Any, statistics: Any, x: Any) -> Any:
        given = {"params": params, "batch_stats": statistics}
        y, updated = Gated().apply(given, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y)), updated

    arguments = (variables["params"], variables["batch_stats"], X)
    assert operators(loss, *arguments) == {"batch_statistics": 1}
    (candidate,) = jax_bnar.explain(loss)(*arguments).candidates
    assert "Gated" in candidate.module
    results = [
        jax.jit(jax.value_and_grad(f, has_aux=True))(*arguments)
        for f in (jax_bnar.fuse(loss), loss)
    ]
    for given, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(given, expected, rtol=2e-4, atol=2e-5)


class GatedModule(nnx.Module):
    def __init__(self) -> None:
        self.gate = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.running = nnx.BatchStat(jnp.ones(8, jnp.float32))

    def __call__(self, x: Any) -> Any:
        mean, var = moments(x)
        self.running[...] = 0.5 * self.running[...] + 0.5 * var.reshape(-1)
        return gated(x, self.gate(x), mean, var)


def test_an_nnx_module() -> None:
    def loss(module: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(module(x)))

    assert operators(loss, GatedModule(), X) == {"batch_statistics": 1}
    results = []
    for f in (jax_bnar.fuse(loss), loss):
        module = GatedModule()
        results.append((nnx.jit(nnx.value_and_grad(f))(module, X), module.running[...]))
    for given, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(given, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@hypothesis.given(
    base=st.sampled_from(BASES),
    index=st.integers(0, 40),
    mutation=st.sampled_from(sorted(MUTATIONS)),
)
@hypothesis.settings(max_examples=example_count(40))
def test_mutants_compute_the_same(base: Callable[..., Any], index: int, mutation: str) -> None:
    """Mutants of a BatchNorm are small, so without the limit of size most of them are matched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics_search, "_FEWEST_ELEMENTS", 0)
        require_equal(mutant(base, index, mutation))


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES, ids=lambda f: f.__name__)
def test_every_mutant_computes_the_same(
    base: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_search, "_FEWEST_ELEMENTS", 0)
    taken = 0
    for index in range(len(jax.make_jaxpr(base)(*OF_MUTANTS).jaxpr.eqns)):
        for mutation in MUTATIONS:
            program = mutant(base, index, mutation)
            taken += "batch_statistics" in operators(program, *OF_MUTANTS)
            require_equal(program)
    # Evaluation has none, and those of members of an ensemble or of examples are not taken alone.
    assert taken > 0 or base.__name__ in ("evaluation", "ensemble", "examples")
