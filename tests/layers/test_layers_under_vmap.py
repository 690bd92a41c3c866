"""Layers under vmap as Flax documents it: one example per call, statistics over the mapped axis.

    y, updated = jax.vmap(apply, in_axes=(None, 0), out_axes=(0, None), axis_name="batch")(...)

Variables are not mapped. Results that are equal along the axis must come back unmapped, or JAX
rejects `out_axes=None`.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import both_implementations
from flax import nnx
from flax_tools import (
    as_flax_needs_it,
    assert_close,
    normal,
    some_variables,
    tolerance,
    trained_looking,
)

from jax_bnar import flax_layers, nnx_layers

BATCH = 6
# Shape and channel axis of one example.
EXAMPLES = {"image": ((4, 5, 3), -1), "channels first": ((3, 4, 5), 0), "vector": ((3,), -1)}
examples = pytest.mark.parametrize(("shape", "axis"), EXAMPLES.values(), ids=EXAMPLES.keys())


def linen(kind: Any, **fields: Any) -> Any:
    if kind is nn.BatchNorm:
        fields["use_fast_variance"] = False
    return kind(use_running_average=False, momentum=0.5, axis_name="batch", **fields)


def variables_for(layer: Any, example: jax.Array) -> Any:
    """Some variables of the layer; `some_variables` passes the mode in its call."""
    return some_variables(layer.clone(use_running_average=None), example)


def applied(layer: Any) -> Callable[..., Any]:
    """A function from (variables, x) to (y, updated) over a batch, with the update unmapped."""

    def one(variables: Any, x: jax.Array) -> Any:
        return layer.apply(variables, x, mutable=["batch_stats"])

    return jax.vmap(one, in_axes=(None, 0), out_axes=(0, None), axis_name="batch")


@both_implementations
@examples
def test_linen_equals_flax(implementation: str, shape: tuple[int, ...], axis: int) -> None:
    """Compares outputs, running statistics, and gradients of parameters and x through both."""
    x, weight = normal(0, (BATCH, *shape)), normal(1, (BATCH, *shape))
    ours = linen(flax_layers.BatchNorm, axis=axis, implementation=implementation)
    plain = linen(nn.BatchNorm, axis=axis)
    variables = variables_for(ours, x[0])

    def outcome(layer: Any) -> Any:
        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def loss(params: Any, x: jax.Array) -> Any:
            y, updated = applied(layer)({**variables, "params": params}, x)
            statistics = sum(jnp.square(v).sum() for v in jax.tree.leaves(updated))
            return (y * weight).sum() + statistics, (y, updated)

        return loss(variables["params"], x)

    with as_flax_needs_it():
        expected = outcome(plain)
    assert_close(outcome(ours), expected, 64 * tolerance(x.dtype))


@both_implementations
def test_linen_gradients_inside(implementation: str) -> None:
    """vmap of grad with gradients averaged over the axis, as in a training step on devices."""
    x, weight = normal(0, (BATCH, 4, 5, 3)), normal(1, (BATCH, 4, 5, 3))
    ours = linen(flax_layers.BatchNorm, implementation=implementation)
    variables = variables_for(ours, x[0])

    def outcome(layer: Any) -> Any:
        def step(params: Any, x: jax.Array, weight: jax.Array) -> Any:
            def loss(params: Any) -> Any:
                y, updated = layer.apply(
                    {**variables, "params": params}, x, mutable=["batch_stats"]
                )
                return (y * weight).sum(), updated

            gradients, updated = jax.grad(loss, has_aux=True)(params)
            return jax.lax.pmean(gradients, "batch"), updated

        mapped = jax.vmap(step, in_axes=(None, 0, 0), out_axes=None, axis_name="batch")
        return jax.jit(mapped)(variables["params"], x, weight)

    with as_flax_needs_it():
        expected = outcome(linen(nn.BatchNorm))
    assert_close(outcome(ours), expected, 64 * tolerance(x.dtype))


@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "relu"},
        {"activation": "relu", "save": "mask"},
        {"activation": nn.celu},
        {"num_groups": 2},
        {"unbiased_running_var": True},
        {"dtype": jnp.bfloat16},
    ],
    ids=["relu", "mask", "celu", "groups", "unbiased", "bfloat16"],
)
@both_implementations
def test_linen_equals_the_whole_batch(implementation: str, fields: dict[str, Any]) -> None:
    """Options that Flax lacks, compared with our layer on all examples at once.

    With groups, an example consists of two halves, and the halves of all examples share statistics.
    """
    x = normal(0, (BATCH, 4, 5, 3))
    residual = -normal(1, x.shape)
    parts = linen(flax_layers.BatchNorm, implementation=implementation, **fields)
    variables = variables_for(parts, x[0])

    def one(x: jax.Array, residual: jax.Array) -> Any:
        return parts.apply(variables, x, residual=residual, mutable=["batch_stats"])

    mapped = jax.vmap(one, out_axes=(0, None), axis_name="batch")
    actual = jax.jit(mapped)(x, residual)
    whole = parts.clone(axis_name=None)
    if "num_groups" in fields:
        # The group comes first in (2, 6, 2, 5, 3), whereas the example comes first in x.
        x, residual = (jnp.moveaxis(a.reshape(BATCH, 2, 2, 5, 3), 1, 0) for a in (x, residual))
    apply = jax.jit(functools.partial(whole.apply, mutable=["batch_stats"]))
    y, updated = apply(variables, x, residual=residual)
    if "num_groups" in fields:
        y = jnp.moveaxis(y, 0, 1).reshape(BATCH, 4, 5, 3)
    assert_close(actual, (y, updated), 16 * tolerance(y.dtype))


def test_linen_mask() -> None:
    """Examples with different numbers of valid elements are counted over the axis."""
    x = normal(0, (BATCH, 4, 5, 3))
    mask = normal(1, (BATCH, 4, 1, 1)) > 2
    layer = linen(flax_layers.BatchNorm, unbiased_running_var=True)
    variables = variables_for(layer, x[0])

    def one(x: jax.Array, mask: jax.Array) -> Any:
        return layer.apply(variables, x, mask=mask, mutable=["batch_stats"])

    actual = jax.vmap(one, out_axes=(0, None), axis_name="batch")(x, mask)
    expected = layer.clone(axis_name=None).apply(variables, x, mask=mask, mutable=["batch_stats"])
    assert_close(actual, expected, 16 * tolerance(x.dtype))


@pytest.mark.parametrize(
    ("axis_name", "over", "apart"), [(("a", "b"), (0, 1), None), ("a", (0,), 1), ("b", (1,), 0)]
)
def test_linen_two_axes(axis_name: Any, over: tuple[int, ...], apart: int | None) -> None:
    """Statistics come back unmapped along the named axes, and only along them."""
    x = normal(0, (3, 2, 4, 5, 3))
    layer = linen(flax_layers.BatchNorm).clone(axis_name=axis_name)
    variables = variables_for(layer, x[0, 0])

    def one(x: jax.Array) -> Any:
        return layer.apply(variables, x, mutable=["batch_stats"])

    inner = jax.vmap(one, out_axes=(0, None if 1 in over else 0), axis_name="b")
    outer = jax.vmap(inner, out_axes=(0, None if 0 in over else 0), axis_name="a")
    actual = jax.jit(outer)(x)
    whole = layer.clone(axis_name=None)

    def together(x: jax.Array) -> Any:
        return whole.apply(variables, x, mutable=["batch_stats"])

    expected = together(x) if apart is None else jax.vmap(together, apart, (apart, 0))(x)
    assert_close(actual, expected, 16 * tolerance(x.dtype))


def test_linen_evaluation_and_init() -> None:
    """Neither uses the batch's statistics; `init` returns the variables for one example."""
    x = normal(0, (BATCH, 4, 5, 3))
    layer = linen(flax_layers.BatchNorm)
    initial = jax.vmap(
        lambda x: layer.init(jax.random.key(0), x), out_axes=None, axis_name="batch"
    )(x)
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(
        jnp.shape, layer.init(jax.random.key(0), x[0])
    )
    variables = variables_for(layer, x[0])
    frozen = layer.clone(use_running_average=True)

    def one(x: jax.Array) -> Any:
        return frozen.apply(variables, x, mutable=["batch_stats"])

    y, updated = jax.vmap(one, out_axes=(0, None), axis_name="batch")(x)
    np.testing.assert_allclose(y, frozen.apply(variables, x), rtol=1e-6, atol=1e-6)
    assert_close(updated, {"batch_stats": variables["batch_stats"]}, 0)


class Net(nn.Module):
    """A network with two norms, written for one example."""

    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8)(x)
        x = nn.relu(linen(self.norm)(x))
        x = nn.Dense(4)(x)
        return linen(self.norm)(x)


def test_linen_network() -> None:
    """A loss per example, as in published code for reinforcement learning."""
    x = normal(0, (16, 5)) - 3
    tree = jax.eval_shape(Net(flax_layers.BatchNorm).init, jax.random.key(0), x[0])
    variables = trained_looking(tree)

    def outcome(kind: Any) -> Any:
        @jax.jit
        @functools.partial(jax.value_and_grad, has_aux=True)
        def loss(params: Any) -> Any:
            y, updated = applied(Net(kind))({**variables, "params": params}, x)
            return jax.nn.logsumexp(y, axis=-1).mean(), updated

        return loss(variables["params"])

    with as_flax_needs_it():
        expected = outcome(nn.BatchNorm)
        actual = outcome(flax_layers.BatchNorm)
    assert_close(actual, expected, 64 * tolerance(x.dtype))


def of_nnx(kind: Any, axis: int, **fields: Any) -> Any:
    if kind is nnx.BatchNorm:
        fields["use_fast_variance"] = False
    layer = kind(3, axis=axis, momentum=0.5, axis_name="batch", rngs=nnx.Rngs(0), **fields)
    nnx.update(layer, trained_looking(nnx.to_pure_dict(nnx.state(layer))))
    return layer


# All examples share the state, including what is neither a parameter nor a statistic.
STATE_AXES = {nnx.Param: None, nnx.BatchStat: None, ...: None}


@both_implementations
@examples
def test_nnx_equals_nnx(implementation: str, shape: tuple[int, ...], axis: int) -> None:
    """`nnx.vmap` with `StateAxes`: outputs, gradients, and the state after the call."""
    x, weight = normal(0, (BATCH, *shape)), normal(1, (BATCH, *shape))

    @nnx.jit
    def outcome(layer: Any, x: jax.Array) -> Any:
        def loss(layer: Any, x: jax.Array) -> Any:
            axes = (nnx.StateAxes(STATE_AXES), 0)
            y = nnx.vmap(lambda layer, x: layer(x), in_axes=axes, axis_name="batch")(layer, x)
            return (y * weight).sum(), y

        return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    def everything(layer: Any) -> Any:
        (value, y), (of_layer, of_x) = outcome(layer, x)
        return value, y, nnx.to_pure_dict(of_layer), of_x, nnx.to_pure_dict(nnx.state(layer))

    with as_flax_needs_it():
        expected = everything(of_nnx(nnx.BatchNorm, axis))
    actual = everything(of_nnx(nnx_layers.BatchNorm, axis, implementation=implementation))
    assert_close(actual, expected, 64 * tolerance(x.dtype))


@both_implementations
def test_nnx_gradients_inside(implementation: str) -> None:
    """`nnx.grad` of one example's loss inside the mapped function."""
    x, weight = normal(0, (BATCH, 4, 5, 3)), normal(1, (BATCH, 4, 5, 3))

    @nnx.jit
    def outcome(layer: Any, x: jax.Array) -> Any:
        def one(layer: Any, x: jax.Array, weight: jax.Array) -> Any:
            gradients = nnx.grad(lambda layer: (layer(x) * weight).sum())(layer)
            return jax.lax.pmean(gradients, "batch")

        axes = (nnx.StateAxes(STATE_AXES), 0, 0)
        return nnx.vmap(one, in_axes=axes, out_axes=None, axis_name="batch")(layer, x, weight)

    def everything(layer: Any) -> Any:
        return nnx.to_pure_dict(outcome(layer, x)), nnx.to_pure_dict(nnx.state(layer))

    with as_flax_needs_it():
        expected = everything(of_nnx(nnx.BatchNorm, -1))
    actual = everything(of_nnx(nnx_layers.BatchNorm, -1, implementation=implementation))
    assert_close(actual, expected, 64 * tolerance(x.dtype))


@pytest.mark.parametrize("fields", [{"activation": "relu"}, {"unbiased_running_var": True}])
def test_nnx_equals_the_whole_batch(fields: dict[str, Any]) -> None:
    x = normal(0, (BATCH, 4, 5, 3))
    residual = -normal(1, x.shape)
    parts = of_nnx(nnx_layers.BatchNorm, -1, **fields)
    whole = of_nnx(nnx_layers.BatchNorm, -1, **fields)
    whole.axis_name = None
    axes = (nnx.StateAxes(STATE_AXES), 0, 0)
    y = nnx.vmap(lambda layer, x, z: layer(x, residual=z), in_axes=axes, axis_name="batch")(
        parts, x, residual
    )
    assert_close(y, whole(x, residual=residual), 16 * tolerance(x.dtype))
    states = (nnx.to_pure_dict(nnx.state(layer)) for layer in (parts, whole))
    assert_close(next(states), next(states), 16 * tolerance(x.dtype))
