"""The statistics of the Linen BatchNorm over groups, masks and mapped axes."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_tools import (
    SHAPE,
    apply,
    as_flax_needs_it,
    assert_close,
    normal,
    some_variables,
    tolerance,
    trained,
)
from jax.sharding import PartitionSpec
from programs import hlo_calls
from sharding_tools import MeshKind, make_mesh, put, use_mesh

from jax_bnar import nnx_layers
from jax_bnar.flax_layers import BatchNorm

pytestmark = pytest.mark.quick


def test_initial_statistics() -> None:
    """`mean_init` and `var_init` take the place of zeros and ones, and change nothing else."""
    x = normal(0)
    constant, random = nn.initializers.constant(3.0), nn.initializers.uniform()
    fields = {"use_running_average": False, "scale_init": random, "bias_init": random}
    of_flax = nn.BatchNorm(**fields).init(jax.random.key(0), x)
    ours = BatchNorm(**fields).init(jax.random.key(0), x)
    assert_close(ours, of_flax, 0)
    layer = BatchNorm(**fields, mean_init=constant, var_init=random)
    given: Any = layer.init(jax.random.key(0), x)["batch_stats"]
    np.testing.assert_array_equal(given["mean"], np.full(3, 3.0, np.float32))
    assert given["var"].dtype == jnp.float32
    assert len(np.unique(given["var"])) == 3
    with_random_means = BatchNorm(**fields, mean_init=random).init(jax.random.key(0), x)
    assert_close(with_random_means["params"], of_flax["params"], 0)
    same = nnx_layers.BatchNorm(3, mean_init=constant, var_init=random, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(same.mean[...], given["mean"])
    assert same.var[...].dtype == jnp.float32
    assert len(np.unique(same.var[...])) == 3
    for name in ("mean_init", "var_init"):
        wrong: Any = {name: lambda key, shape, dtype: jnp.ones((), dtype)}
        words = rf"{name}\(key, shape, dtype\) must return .* shape, \(3,\), got shape \(\)"
        with pytest.raises(ValueError, match=words):
            BatchNorm(**fields, **wrong).init(jax.random.key(0), x)
        with pytest.raises(ValueError, match=words):
            nnx_layers.BatchNorm(3, **wrong, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("masked", [False, True])
def test_ghost_batch(masked: bool) -> None:
    """Each group is normalised separately; running statistics use the mean over the groups."""
    x = normal(0)
    mask = normal(1, (6, 1, 1, 1)) > 2 if masked else None
    layer = BatchNorm(num_groups=3, momentum=0.5, unbiased_running_var=True, activation="relu")
    variables = some_variables(layer, x[:1])  # a batch of 1 is enough for init
    y, updated = trained(layer, variables, x, mask=mask)
    parts = [
        trained(
            layer.clone(num_groups=1),
            variables,
            x[i : i + 2],
            mask=None if mask is None else mask[i : i + 2],
        )
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(y, jnp.concatenate([part for part, _ in parts]), atol=1e-5)
    mean = jax.tree.map(lambda *s: jnp.stack(s).mean(axis=0), *(stats for _, stats in parts))
    assert_close(updated, mean, tolerance(x.dtype))


def test_the_unbiased_variance_of_a_single_element_is_zero() -> None:
    x = normal(0, (6, 3))
    layer = BatchNorm(momentum=0.0, unbiased_running_var=True)
    mask = np.arange(6)[:, None] == 2
    _, updated = trained(layer, some_variables(layer, x), x, mask=mask)
    np.testing.assert_array_equal(updated["batch_stats"]["var"], np.zeros(3))
    np.testing.assert_allclose(updated["batch_stats"]["mean"], np.asarray(x)[2], rtol=1e-6)


def a_mask(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).random(shape) < 0.6)


@pytest.mark.parametrize("mask_shape", [(6, 1, 1, 1), SHAPE, (5, 1)], ids=str)
@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), (1, 3)], ids=str)
def test_mask_equals_flax(mask_shape: tuple[int, ...], axis: Any) -> None:
    x, mask = normal(0), a_mask(mask_shape)
    layer = BatchNorm(axis=axis)
    variables = some_variables(layer, x)
    plain = nn.BatchNorm(axis=axis, use_fast_variance=False)

    def loss(layer: nn.Module, x: jax.Array) -> tuple[jax.Array, Any]:
        y, updated = trained(layer, variables, x, mask=mask)
        return jnp.square(y).sum() + updated["batch_stats"]["var"].sum(), (y, updated)

    with as_flax_needs_it():
        expected = jax.grad(loss, argnums=1, has_aux=True)(plain, x)
    actual = jax.grad(loss, argnums=1, has_aux=True)(layer, x)
    assert_close(actual, expected, 8 * tolerance(x.dtype))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_a_mask_of_numbers_selects_where_they_are_not_zero(dtype: Any) -> None:
    """As in Flax."""
    x, mask = normal(0), a_mask((6, 1, 1, 1))
    variables = some_variables(BatchNorm(), x)
    expected, actual = (
        trained(BatchNorm(), variables, x, mask=each) for each in (mask, 2 * mask.astype(dtype))
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("mask", "dtype"), [("valid", "<U5"), (np.array([["a"]]), "<U1"), ({"valid": True}, "object")]
)
def test_what_is_no_mask_is_refused(mask: Any, dtype: str) -> None:
    x, layer = normal(0), BatchNorm(use_running_average=False)
    with pytest.raises(TypeError, match=f"mask must be an array of bool, .* got dtype {dtype}"):
        layer.apply(some_variables(BatchNorm(), x), x, mask=mask, mutable=["batch_stats"])


def test_masked_elements_do_not_reach_the_statistics() -> None:
    mask = a_mask(SHAPE)
    x = jnp.where(mask, normal(0), jnp.full(SHAPE, jnp.inf))
    layer = BatchNorm(activation="relu")
    variables = some_variables(layer, x)

    def variance(x: jax.Array) -> jax.Array:
        return trained(layer, variables, x, mask=mask)[1]["batch_stats"]["var"].sum()

    value, gradient = jax.value_and_grad(variance)(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    _, nothing = trained(layer, variables, x, mask=jnp.zeros_like(mask))
    assert np.isnan(nothing["batch_stats"]["var"]).all()


def test_mask_keeps_the_variance_of_a_far_away_mean() -> None:
    x = jnp.asarray(1e6 + np.random.default_rng(0).normal(size=(512, 3)), jnp.float32)
    mask = a_mask((512, 1))
    _, updated = trained(BatchNorm(momentum=0.0), some_variables(BatchNorm(), x), x, mask=mask)
    expected = np.var(np.asarray(x, np.float64)[np.asarray(mask)[:, 0]], axis=0)
    np.testing.assert_allclose(updated["batch_stats"]["var"], expected, rtol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
def test_mask_runs_the_kernels(activation: Any, residual: bool) -> None:
    x, mask = normal(0).astype(jnp.bfloat16), a_mask((6, 4, 1, 1))
    layer = BatchNorm(activation=activation, implementation="ffi")
    variables = some_variables(layer, x)

    def loss(x: jax.Array) -> jax.Array:
        named = {"residual": x[::-1]} if residual else {}
        y, updated = trained(layer, variables, x, mask=mask, **named)
        return jnp.square(y).sum() + updated["batch_stats"]["var"].sum()

    # y is float32. For SiLU, x has been widened, so dx is a multiple of dz in the dtype of dz.
    apply = "normalise" if residual and activation == "silu" else "backward_apply"
    each = ("statistics", "statistics", "normalise", "backward_reduce", apply)
    expected = Counter(f"jax_bnar_{operation}_v1" for operation in each)
    assert hlo_calls(jax.value_and_grad(loss), x) == expected


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mask_of_a_sharded_ghost_batch(kind: MeshKind) -> None:
    x, mask = normal(0, (16, 5, 3)), a_mask((16, 5, 1))
    layer = BatchNorm(num_groups=4, momentum=0.0, activation="relu")
    variables = some_variables(layer, x[:4])

    def step(x: jax.Array, mask: jax.Array) -> Any:
        def loss(x: jax.Array) -> Any:
            y, updated = trained(layer, variables, x, mask=mask, residual=x[::-1])
            return jnp.square(y).sum(), updated

        return jax.value_and_grad(loss, has_aux=True)(x)

    expected = jax.jit(step)(x, mask)
    mesh = make_mesh(kind, d=8)
    with use_mesh(mesh):
        actual = jax.jit(step)(put(x, mesh, PartitionSpec("d")), put(mask, mesh, PartitionSpec()))
    assert_close(actual, expected, 8 * tolerance(x.dtype))


def test_axis_name_under_vmap() -> None:
    """Statistics over the mapped axis, and their gradients, are those of the whole batch."""
    x, weight = normal(0), normal(1)
    whole, part = BatchNorm(activation="relu"), BatchNorm(activation="relu", axis_name="parts")
    variables = some_variables(part, x)  # there is no axis of that name during init

    def loss_of_whole(x: jax.Array) -> tuple[jax.Array, Any]:
        y, updated = trained(whole, variables, x)
        return (y * weight).sum(), updated

    def loss_of_parts(x: jax.Array) -> tuple[jax.Array, Any]:
        run = jax.vmap(lambda x: trained(part, variables, x), axis_name="parts")
        y, updated = run(x.reshape(3, 2, *SHAPE[1:]))
        return (y.reshape(SHAPE) * weight).sum(), jax.tree.map(lambda s: s[0], updated)

    expected = jax.value_and_grad(loss_of_whole, has_aux=True)(x)
    actual = jax.value_and_grad(loss_of_parts, has_aux=True)(x)
    assert_close(actual, expected, 8 * tolerance(x.dtype))
    np.testing.assert_allclose(
        apply(part, variables, x, use_running_average=True),
        apply(whole, variables, x, use_running_average=True),
    )


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]], ids=str)
def test_axis_name_under_shard_map(groups: Any) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, weight = normal(0, (8, 3)), normal(1, (8, 3))
    layer = BatchNorm(axis_name="data", axis_index_groups=groups, update_batch_stats=False)
    variables = some_variables(layer, x)
    data = PartitionSpec("data")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), data),
        out_specs=data,
        check_vma=groups is None,  # JAX does not support psum over groups with the check
    )
    def run(variables: Any, x: jax.Array) -> jax.Array:
        return apply(layer, variables, x, use_running_average=False)

    def alone(variables: Any, x: jax.Array) -> jax.Array:
        plain = BatchNorm(num_groups=1 if groups is None else 2, update_batch_stats=False)
        return apply(plain, variables, x, use_running_average=False)

    def gradients(function: Callable[..., jax.Array]) -> Any:
        def loss(variables: Any, x: jax.Array) -> jax.Array:
            return (function(variables, x) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    assert_close(gradients(run), gradients(alone), 8 * tolerance(x.dtype))


def test_axis_name_weighs_by_count() -> None:
    x = normal(0, (2, 4, 3))
    mask = jnp.asarray([[True] * 4, [True, False, False, False]])[:, :, None]
    layer = BatchNorm(axis_name="parts", momentum=0.0, unbiased_running_var=True)
    variables = some_variables(layer, x[0])
    _, updated = jax.vmap(
        lambda x, mask: trained(layer, variables, x, mask=mask), axis_name="parts"
    )(x, mask)
    counted = np.concatenate([x[0], x[1, :1]]).astype(np.float64)
    for part in range(2):
        statistics = jax.tree.map(lambda s, part=part: s[part], updated["batch_stats"])
        np.testing.assert_allclose(statistics["mean"], counted.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(statistics["var"], counted.var(axis=0, ddof=1), rtol=1e-5)
