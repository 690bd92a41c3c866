"""vmap over every subset of operands: each example has its own statistics, as in a loop."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, both_implementations, operands
from programs import ours
from trees import assert_trees_close

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

NAMES = ("x", "z", "scale", "bias")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(NAMES, size)]
CASE = Case((4, 3, 9))
SIZE = 3


def examples(mapped: tuple[str, ...], axes: dict[str, int]) -> tuple[list[Any], list[int | None]]:
    """Operands, stacked along an axis if they are in `mapped`, and the `in_axes`."""
    stacked = [operands(Case(CASE.shape, seed=seed)) for seed in range(SIZE)]
    arrays, in_axes = [], []
    for name in NAMES:
        each = [getattr(one, name) for one in stacked]
        axis = axes.get(name, 0) if name in mapped else None
        arrays.append(each[0] if axis is None else np.stack(each, axis))
        in_axes.append(axis)
    return arrays, in_axes


@functools.cache
def value_and_gradients(implementation: Implementation, **keywords: Any) -> Any:
    def loss(*given: Any) -> Any:
        result = jax_bnar.bn_add_relu(*given, implementation=implementation, **keywords)
        weights = jnp.linspace(-1, 1, result.y.size).reshape(result.y.shape)
        total = (result.y * weights.astype(np.float32)).sum() + (result.mean * result.var).sum()
        return total, result

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))


def in_a_loop(function: Any, arrays: list[Any], in_axes: list[int | None]) -> Any:
    results = [
        function(
            *(
                array if axis is None else np.take(array, i, axis)
                for array, axis in zip(arrays, in_axes, strict=True)
            )
        )
        for i in range(SIZE)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


OTHER_AXES = {"x": 1, "z": 3, "scale": 1, "bias": 0}


@pytest.mark.parametrize(
    ("implementation", "save", "axes"),
    [("ffi", "mask", {}), ("ffi", "y", OTHER_AXES), ("xla", "mask", OTHER_AXES)],
)
@pytest.mark.parametrize("mapped", SUBSETS, ids="-".join)
def test_every_subset(
    implementation: Implementation, save: Save, axes: dict[str, int], mapped: tuple[str, ...]
) -> None:
    """Values and gradients with respect to all operands equal those of a loop."""
    function = value_and_gradients(implementation, save=save)
    arrays, in_axes = examples(mapped, axes)
    actual = jax.vmap(function, in_axes)(*arrays)
    assert_trees_close(actual, in_a_loop(function, arrays, in_axes))


@both_implementations
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_negative_axes_and_out_axes(implementation: Implementation, out_axis: int) -> None:
    arrays, in_axes = examples(NAMES, {"x": 2, "z": 3, "scale": 1, "bias": 1})

    def function(*given: Any) -> Any:
        return jax_bnar.bn_add_relu(*given, implementation=implementation)

    negative = [a - np.ndim(array) for a, array in zip(in_axes, arrays, strict=True) if a]
    actual = jax.vmap(function, negative, out_axis)(*arrays)
    expected = in_a_loop(function, arrays, in_axes)
    assert_trees_close(actual, jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, out_axis), expected))


@both_implementations
@pytest.mark.parametrize("inner", [("x",), ("z", "bias")], ids="-".join)
@pytest.mark.parametrize("outer", [("scale",), ("x", "z", "bias")], ids="-".join)
def test_nested(
    implementation: Implementation, inner: tuple[str, ...], outer: tuple[str, ...]
) -> None:
    """Two mapped axes, over different operands."""
    function = value_and_gradients(implementation, save="mask")
    arrays, inner_axes = examples(inner, {"x": 1})
    # The outer axis comes first and multiplies the operands, which changes every example.
    factors = np.array([1.0, -0.5], np.float32)
    outer_axes = [0 if name in outer else None for name in NAMES]
    arrays = [
        array if axis is None else np.multiply.outer(factors, array)
        for array, axis in zip(arrays, outer_axes, strict=True)
    ]
    actual = jax.vmap(jax.vmap(function, inner_axes), outer_axes)(*arrays)
    expected = [
        in_a_loop(
            function,
            [
                array if axis is None else array[i]
                for array, axis in zip(arrays, outer_axes, strict=True)
            ],
            inner_axes,
        )
        for i in range(2)
    ]
    assert_trees_close(actual, jax.tree.map(lambda *leaves: np.stack(leaves), *expected))


@both_implementations
def test_vmap_of_groups(implementation: Implementation) -> None:
    """The mapped axis and ghost groups share the leading axis of the canonical shape."""
    arrays, in_axes = examples(("x", "scale"), {"x": 1})
    function = value_and_gradients(implementation, num_groups=2, save="mask")
    actual = jax.vmap(function, in_axes)(*arrays)
    assert_trees_close(actual, in_a_loop(function, arrays, in_axes))


@pytest.mark.parametrize("mapped", SUBSETS, ids="-".join)
def test_vmap_stays_one_call(mapped: tuple[str, ...]) -> None:
    """A batching rule that loops would be correct, but slow."""
    arrays, in_axes = examples(mapped, {})
    function = jax.vmap(value_and_gradients(None), in_axes)
    assert ours(function, *arrays) == {"forward": 1, "backward": 1}


@both_implementations
@pytest.mark.parametrize("mapped", SUBSETS, ids="-".join)
def test_what_examples_share_is_not_mapped(
    implementation: Implementation, mapped: tuple[str, ...]
) -> None:
    """With `out_axes=None`, JAX must know that the results are the same for all examples."""
    arrays, in_axes = examples(mapped, {})

    def function(*given: Any) -> Any:
        return tuple(jax_bnar.bn_add_relu(*given, implementation=implementation))

    axis = 0 if "x" in mapped else None
    mapped_function = jax.vmap(
        lambda *given: jax.jvp(function, given, given), in_axes, out_axes=((0, axis, axis),) * 2
    )
    (_, mean, var), (_, mean_dot, var_dot) = jax.eval_shape(mapped_function, *arrays)
    for result in (mean, var, mean_dot, var_dot):
        assert result.ndim == (2 if "x" in mapped else 1)


@both_implementations
def test_gradients_that_examples_share_are_not_mapped(implementation: Implementation) -> None:
    """Without a ReLU, the gradient of the bias is the sum of the cotangents, for any x."""
    (xs, dy, scale, bias), _ = examples(("x",), {})

    def dbias(x: Any) -> Any:
        def y(bias: Any) -> Any:
            return jax_bnar.batch_norm(x, scale, bias, implementation=implementation).y

        return jax.vjp(y, bias)[1](dy)[0]

    np.testing.assert_allclose(
        jax.vmap(dbias, out_axes=None)(xs), dy.sum((0, 1)), rtol=1e-5, atol=1e-5
    )


@both_implementations
def test_jacobian_through_jit(implementation: Implementation) -> None:
    """A Jacobian maps a vjp over its cotangent; the other operands of backward are not mapped."""
    x, z, scale, bias = (jnp.asarray(a)[..., :2] for a in operands(CASE))

    def function(x: Any, scale: Any) -> Any:
        return jax_bnar.bn_add_relu(x, z, scale, bias, implementation=implementation)

    eager = jax.jacrev(function, (0, 1))(x, scale)
    jitted = jax.jit(jax.jacrev(lambda *given: function(*given), (0, 1)))(x, scale)
    assert_trees_close(jitted, eager, tolerance=1e-4)
    # Check one block: dy/dscale is xhat where y > 0.
    result = jax.tree.map(np.asarray, function(x, scale))
    xhat = (np.asarray(x) - result.mean) / np.sqrt(result.var + 1e-5)
    diagonal = np.einsum("ijkk->ijk", np.asarray(eager.y[1]))
    np.testing.assert_allclose(diagonal, np.where(result.y > 0, xhat, 0), atol=1e-4)


def loss_of_all_results(*given: Any) -> Any:
    result = jax_bnar.bn_add_relu(*given, save="mask")
    return (result.y * jnp.cos(result.y)).sum() + (result.mean * result.var).sum()


def test_per_example_gradients() -> None:
    """vmap of grad with respect to shared parameters takes one call each way."""
    arrays, in_axes = examples(("x", "z"), {})
    function = jax.vmap(jax.grad(loss_of_all_results, (2, 3)), in_axes)
    assert ours(function, *arrays) == {"forward": 1, "backward": 1}
    actual = jax.jit(function)(*arrays)
    assert_trees_close(actual, in_a_loop(jax.grad(loss_of_all_results, (2, 3)), arrays, in_axes))


@pytest.mark.parametrize("argument", range(4))
def test_jacobian_is_one_call(argument: int) -> None:
    """One call of backward gives all rows, whose sum is the gradient of the sum."""
    given = [jnp.asarray(a)[..., :2] for a in operands(CASE)]

    def function(*given: Any) -> Any:
        return jax_bnar.bn_add_relu(*given, save="mask").y

    jacobian = jax.jacrev(function, argument)
    assert ours(jacobian, *given) == {"forward": 1, "backward": 1}
    rows = jax.jit(jacobian)(*given)
    assert rows.shape == (*given[0].shape, *given[argument].shape)
    gradient = jax.grad(lambda *given: function(*given).sum(), argument)(*given)
    np.testing.assert_allclose(rows.sum(axis=(0, 1, 2)), gradient, rtol=1e-4, atol=1e-4)


def test_nested_is_one_call() -> None:
    arrays, in_axes = examples(("x", "bias"), {})
    doubled = [
        np.stack([a, -a]) if name == "scale" else a for name, a in zip(NAMES, arrays, strict=True)
    ]
    function = jax.vmap(jax.vmap(jax.grad(loss_of_all_results), in_axes), (None, None, 0, None))
    assert ours(function, *doubled) == {"forward": 1, "backward": 1}
    assert jax.eval_shape(function, *doubled).shape == (2, SIZE, *CASE.shape)
