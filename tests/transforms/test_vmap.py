"""vmap over every subset of operands: each example has its own statistics, as in a loop."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Case,
    Form,
    both_implementations,
    by_input,
    call,
    in_order,
    inputs_of,
    names_of,
    one_or_two_inputs,
    operands,
    operation_of,
    product_of_statistics,
)
from programs import ours
from trees import assert_trees_close

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

NAMES = ("x", "z", "scale", "bias")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(NAMES, size)]
# With two inputs there are 63.
SUBSETS_OF_TWO = [
    ("x1",),
    ("x2",),
    ("x1", "x2"),
    ("scale1", "bias2"),
    ("x1", "x2", "scale1", "bias1", "scale2", "bias2"),
]
subsets = pytest.mark.parametrize(
    ("form", "mapped"),
    [
        *(pytest.param("bn_add_relu", mapped, id="-".join(mapped)) for mapped in SUBSETS),
        *(pytest.param("dual_bn_add_relu", m, id="-".join(m)) for m in SUBSETS_OF_TWO),
    ],
)
CASE = Case((4, 3, 9))
SIZE = 3


def examples(
    mapped: tuple[str, ...], axes: dict[str, int], form: Form = "bn_add_relu"
) -> tuple[list[Any], list[int | None]]:
    """Operands, stacked along an axis if they are in `mapped`, and the `in_axes`."""
    stacked = [in_order(operands(Case(CASE.shape, form=form, seed=seed))) for seed in range(SIZE)]
    arrays, in_axes = [], []
    for name, *each in zip(names_of(form), *stacked, strict=True):
        axis = axes.get(name, 0) if name in mapped else None
        arrays.append(each[0] if axis is None else np.stack(each, axis))
        in_axes.append(axis)
    return arrays, in_axes


def results_of(form: Form, *given: Any, **keywords: Any) -> tuple[Any, ...]:
    return tuple(call(form, *by_input(form, *given), **keywords))


@functools.cache
def value_and_gradients(
    implementation: Implementation, form: Form = "bn_add_relu", **keywords: Any
) -> Any:
    def loss(*given: Any) -> Any:
        results = results_of(form, *given, implementation=implementation, **keywords)
        y, mean, var = results
        weights = jnp.linspace(-1, 1, y.size).reshape(y.shape)
        total = (y * weights.astype(np.float32)).sum() + product_of_statistics(mean, var)
        return total, results

    everything = tuple(range(len(names_of(form))))
    return jax.jit(jax.value_and_grad(loss, everything, has_aux=True))


def one_call_each_way(form: Form) -> dict[str, int]:
    return {operation_of(form, name): 1 for name in ("forward", "backward")}


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


OTHER_AXES = {"x": 1, "z": 3, "scale": 1, "bias": 0, "x1": 1, "x2": 3, "scale2": 1}


@pytest.mark.parametrize(
    ("implementation", "save", "axes"),
    [("ffi", "mask", {}), ("ffi", "y", OTHER_AXES), ("xla", "mask", OTHER_AXES)],
)
@subsets
def test_every_subset(
    implementation: Implementation,
    save: Save,
    axes: dict[str, int],
    form: Form,
    mapped: tuple[str, ...],
) -> None:
    """Values and gradients with respect to all operands equal those of a loop."""
    function = value_and_gradients(implementation, form, save=save)
    arrays, in_axes = examples(mapped, axes, form)
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
@pytest.mark.parametrize(
    ("form", "mapped"), [("bn_add_relu", ("x", "scale")), ("dual_bn_add_relu", ("x1", "scale2"))]
)
def test_vmap_of_groups(
    implementation: Implementation, form: Form, mapped: tuple[str, ...]
) -> None:
    """The mapped axis and ghost groups share the leading axis of the canonical shape."""
    arrays, in_axes = examples(mapped, {"x": 1, "x1": 1}, form)
    function = value_and_gradients(implementation, form, num_groups=2, save="mask")
    actual = jax.vmap(function, in_axes)(*arrays)
    assert_trees_close(actual, in_a_loop(function, arrays, in_axes))


@subsets
def test_vmap_stays_one_call(form: Form, mapped: tuple[str, ...]) -> None:
    """A batching rule that loops would be correct, but slow."""
    arrays, in_axes = examples(mapped, {}, form)
    function = jax.vmap(value_and_gradients(None, form), in_axes)
    assert ours(function, *arrays) == one_call_each_way(form)


@both_implementations
@subsets
def test_what_examples_share_is_not_mapped(
    implementation: Implementation, form: Form, mapped: tuple[str, ...]
) -> None:
    """With `out_axes=None`, JAX must know that the results are the same for all examples."""
    arrays, in_axes = examples(mapped, {}, form)

    def function(*given: Any) -> Any:
        return results_of(form, *given, implementation=implementation)

    inputs = ("x",) if inputs_of(form) == 1 else ("x1", "x2")
    axes: list[int | None] = [0 if x in mapped else None for x in inputs]
    of_statistics: Any = tuple(axes) if len(axes) > 1 else axes[0]
    out_axes = ((0, of_statistics, of_statistics),) * 2
    mapped_function = jax.vmap(
        lambda *given: jax.jvp(function, given, given), in_axes, out_axes=out_axes
    )
    for _, *statistics in jax.eval_shape(mapped_function, *arrays):
        for of_inputs in statistics:
            ranks = [result.ndim for result in jax.tree.leaves(of_inputs)]
            assert ranks == [1 if axis is None else 2 for axis in axes]


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


def loss_of_all_results(*given: Any, form: Form = "bn_add_relu") -> Any:
    y, mean, var = results_of(form, *given, save="mask")
    return (y * jnp.cos(y)).sum() + product_of_statistics(mean, var)


@one_or_two_inputs
def test_per_example_gradients(form: Form) -> None:
    """vmap of grad with respect to shared parameters takes one call each way."""
    arrays, in_axes = examples(names_of(form)[:2], {}, form)
    shared = tuple(range(2, len(arrays)))
    gradient = jax.grad(functools.partial(loss_of_all_results, form=form), shared)
    function = jax.vmap(gradient, in_axes)
    assert ours(function, *arrays) == one_call_each_way(form)
    actual = jax.jit(function)(*arrays)
    assert_trees_close(actual, in_a_loop(gradient, arrays, in_axes))


@pytest.mark.parametrize(
    ("form", "argument"),
    [
        *(("bn_add_relu", argument) for argument in range(4)),
        *(("dual_bn_add_relu", argument) for argument in (1, 4)),
    ],
)
def test_jacobian_is_one_call(form: Form, argument: int) -> None:
    """One call of backward gives all rows, whose sum is the gradient of the sum."""
    given = [jnp.asarray(a)[..., :2] for a in in_order(operands(Case(CASE.shape, form=form)))]

    def function(*given: Any) -> Any:
        return results_of(form, *given, save="mask")[0]

    jacobian = jax.jacrev(function, argument)
    assert ours(jacobian, *given) == one_call_each_way(form)
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
