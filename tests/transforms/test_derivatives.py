"""Forward mode and higher derivatives, which cost first-order reverse mode nothing."""

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
    both_implementations,
    call,
    call_inference,
    inputs_of,
    one_or_two_inputs,
    operands,
    operation_of,
    product_of_statistics,
    unfused,
)
from oracle import each_input
from programs import hlo_calls, ours, primitives
from trees import assert_trees_close

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((4, 3, 2), seed=3, **FLOAT64)
EVERYTHING = (0, 1, 2, 3)
saves = pytest.mark.parametrize("save", ["y", "mask"])


def of(form: Form) -> tuple[Any, ...]:
    return tuple(operands(Case((4, 3, 2), form=form, seed=3, **FLOAT64)))


def fused(
    implementation: Implementation = None, form: Form = "bn_add_relu", **keywords: Any
) -> Any:
    def function(*given: Any) -> tuple[Any, ...]:
        return tuple(call(form, *given, implementation=implementation, **keywords))

    return function


def plain(*given: Any) -> tuple[Any, ...]:
    return tuple(unfused(*given))


def tangents(given: Any, seed: int = 5) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda a: random.standard_normal(a.shape).astype(a.dtype), given)


def nonlinear(y: Any, mean: Any, var: Any) -> Any:
    """A loss that depends on every result."""
    return (y**3).sum() + product_of_statistics(mean, var)


@both_implementations
@one_or_two_inputs
@saves
def test_jvp_and_linearize(implementation: Implementation, form: Form, save: Save) -> None:
    """Tangents of y, mean and var."""
    given = of(form)
    moved = tangents(given)
    function = fused(implementation, form, save=save)
    expected = jax.jvp(plain, given, moved)
    assert_trees_close(jax.jvp(function, given, moved), expected, tolerance=1e-10)
    value, linear = jax.linearize(jax.jit(function), *given)
    assert_trees_close((value, linear(*moved)), expected, tolerance=1e-10)


@pytest.mark.parametrize("form", ["bn_relu", "batch_norm"])
def test_jvp_without_residual(form: Form) -> None:
    """The gate is recovered from x, or there is none."""
    given = of(form)

    def formula(*given: Any) -> tuple[Any, ...]:
        return tuple(unfused(*given, relu=form != "batch_norm"))

    actual = jax.jvp(fused(form=form), given, tangents(given))
    expected = jax.jvp(formula, given, tangents(given))
    assert_trees_close(actual, expected, tolerance=1e-10)


@pytest.mark.parametrize("absent", [(), (2,), (3,), (2, 3)], ids=["all", "scale", "bias", "both"])
@pytest.mark.parametrize(
    ("form", "moving"),
    [
        *(("bn_add_relu", (i,)) for i in EVERYTHING),
        *(("dual_bn_add_relu", moving) for moving in ((0, 0), (0, 1), (2, 1), (3, 0))),
    ],
    ids=str,
)
def test_jvp_in_one_operand(form: Form, moving: tuple[int, ...], absent: tuple[int, ...]) -> None:
    """The other tangents are symbolic zeros, and scale and bias may be None.

    `moving` is the position of the operand, and of the input that it belongs to if there are two.
    """
    operand, *number = moving
    if operand in absent:
        return
    given: list[Any] = [None if i in absent else tree for i, tree in enumerate(of(form))]

    def along(function: Any) -> Any:
        def of_one(array: Any) -> Any:
            arguments = list(given)
            if number:
                pair = list(given[operand])
                pair[number[0]] = array
                array = tuple(pair)
            arguments[operand] = array
            return function(*arguments)

        primal = given[operand][number[0]] if number else given[operand]
        return jax.jvp(of_one, (primal,), tangents((primal,)))

    actual = along(fused(form=form, save="mask"))
    assert_trees_close(actual, along(plain), tolerance=1e-10)


@both_implementations
def test_jacobians(implementation: Implementation) -> None:
    given = tuple(operands(CASE))
    expected = jax.jit(jax.jacrev(plain, EVERYTHING))(*given)
    for jacobian in (jax.jacfwd, jax.jacrev):
        actual = jax.jit(jacobian(fused(implementation, save="mask"), EVERYTHING))(*given)
        assert_trees_close(actual, expected, tolerance=1e-9)


@both_implementations
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_hessians(implementation: Implementation, outer: Any, inner: Any) -> None:
    """Jacobians map a derivative over the identity; its other operands are not mapped."""
    given = tuple(a[..., :1] for a in operands(CASE))

    def hessian(function: Any, outer: Any, inner: Any) -> Any:
        def loss(*given: Any) -> Any:
            return nonlinear(*function(*given))

        return jax.jit(outer(inner(loss, EVERYTHING), EVERYTHING))(*given)

    expected = hessian(plain, jax.jacfwd, jax.jacrev)
    actual = hessian(fused(implementation, save="mask"), outer, inner)
    assert_trees_close(actual, expected, tolerance=1e-8)


def test_jvp_of_vmap_and_vmap_of_jvp() -> None:
    """Only z and bias are mapped: then residuals are mapped, but the tangent of x is not."""
    x, z, scale, bias = operands(CASE)
    given = (x, np.stack([z, -z, 2 * z], axis=1), scale, np.stack([bias, bias + 1, -bias]))
    axes = (None, 1, None, 0)
    moved = tangents(given)

    def outside(function: Any) -> Any:
        return jax.jit(functools.partial(jax.jvp, jax.vmap(function, axes)))(given, moved)

    def inside(function: Any) -> Any:
        along = jax.vmap(lambda *both: jax.jvp(function, both[:4], both[4:]), axes * 2)
        return jax.jit(along)(*given, *moved)

    expected = outside(plain)
    assert_trees_close(outside(fused(save="mask")), expected, tolerance=1e-10)
    assert_trees_close(inside(fused(save="mask")), expected, tolerance=1e-10)
    assert_trees_close(inside(fused("xla")), expected, tolerance=1e-10)


def test_gradient_of_vmap_with_unmapped_operands() -> None:
    """The transpose of a mapped tangent sums over the examples that share an operand."""
    x, z, scale, bias = operands(CASE)
    zs = np.stack([z, -z, 2 * z], axis=1)

    def loss(function: Any) -> Any:
        def total(*given: Any) -> Any:
            y, mean, var = jax.vmap(function, (None, 1, None, None))(*given)
            weights = jnp.linspace(-1, 1, y.size).astype(y.dtype).reshape(y.shape)
            return (y * weights).sum() + (mean * var).sum()

        return jax.jit(jax.grad(total, EVERYTHING))

    given = (x, zs, scale, bias)
    assert_trees_close(loss(fused())(*given), loss(plain)(*given), tolerance=1e-9)
    assert ours(loss(fused()), *given) == {"forward": 1, "backward": 1}


@both_implementations
@one_or_two_inputs
@pytest.mark.parametrize("order", ["rev-rev", "fwd-rev", "rev-fwd", "fwd-fwd"])
def test_hessian_vector_products(implementation: Implementation, form: Form, order: str) -> None:
    given = of(form)
    moved = tangents(given)

    def product(function: Any) -> Any:
        def loss(*given: Any) -> Any:
            return nonlinear(*function(*given))

        def slope(*given: Any) -> Any:
            return jax.jvp(loss, given, moved)[1]

        if order == "rev-fwd":
            return jax.grad(slope, EVERYTHING)(*given)
        if order == "fwd-rev":
            return jax.jvp(jax.grad(loss, EVERYTHING), given, moved)[1]
        if order == "fwd-fwd":
            return jax.jvp(slope, given, tangents(given, seed=6))[1]

        def along(*given: Any) -> Any:
            slopes = jax.tree.map(
                lambda gradient, direction: (gradient * direction).sum(),
                jax.grad(loss, EVERYTHING)(*given),
                moved,
            )
            return sum(jax.tree.leaves(slopes))

        return jax.grad(along, EVERYTHING)(*given)

    actual = jax.jit(lambda: product(fused(implementation, form, save="mask")))()
    assert_trees_close(actual, jax.jit(lambda: product(plain))(), tolerance=1e-8)


def test_third_order() -> None:
    x, z, scale, bias = map(jnp.asarray, operands(CASE))

    def third(function: Any) -> Any:
        def loss(factor: Any) -> Any:
            y, _, var = function(x * factor, z, scale, bias)
            return (y**3).sum() + (var**2).sum()

        return jax.jit(jax.grad(jax.grad(jax.grad(loss))))

    np.testing.assert_allclose(third(fused())(1.3), third(plain)(1.3), rtol=1e-9)


@one_or_two_inputs
def test_inference_forward_mode(form: Form) -> None:
    x, z, scale, bias = of(form)
    statistics = (np.array([0.1, -0.2]), np.array([1.0, 2.0]))
    mean, var = (jax.tree.map(lambda _, v=v: v, scale) for v in statistics)
    given = (x, z, scale, bias, mean, var)

    def formula(x: Any, z: Any, *vectors: Any) -> Any:
        def normalised(x: Any, *vectors: Any) -> Any:
            scale, bias, mean, var = (jnp.broadcast_to(v, x.shape) for v in vectors)
            return scale * (x - mean) * jax.lax.rsqrt(var + 1e-5) + bias

        y = functools.reduce(jnp.add, [normalised(*own) for own in each_input(x, *vectors)])
        return jax.nn.relu(y if z is None else y + z)

    actual = jax.jvp(functools.partial(call_inference, form), given, tangents(given))
    assert_trees_close(actual, jax.jvp(formula, given, tangents(given)), tolerance=1e-10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@one_or_two_inputs
def test_tangent_is_rounded_once(dtype: str, form: Form) -> None:
    """Like y, the tangent is as close to float64 as the unfused one."""
    given = tuple(operands(Case((64, 3, 5), dtype=dtype, form=form)))
    moved = tangents(given)
    wide = jax.tree.map(lambda a: a.astype(np.float64), (given, moved))
    exact = jax.jvp(plain, *wide)[1]
    errors = []
    for function in (fused(form=form), plain):
        y_dot, *_ = jax.jvp(function, given, moved)[1]
        assert y_dot.dtype == jnp.dtype(dtype)
        # Elements whose pre-activation is at the kink may take either side.
        error = np.abs(np.asarray(y_dot, np.float64) - exact[0])
        errors.append(np.quantile(error, 0.95))
    assert errors[0] <= errors[1]


@one_or_two_inputs
@saves
def test_first_order_is_two_kernels(form: Form, save: Save) -> None:
    """Support for forward mode costs reverse mode nothing: no tangents are left in the program."""
    given = operands(Case((8, 6, 5), form=form))
    names = [operation_of(form, name) for name in ("forward", "backward")]

    def loss(*given: Any) -> Any:
        return fused(form=form, save=save)(*given)[0].sum()

    for gradient in (jax.grad(loss, EVERYTHING), jax.jit(jax.grad(jax.jit(loss), EVERYTHING))):
        assert ours(gradient, *given) == dict.fromkeys(names, 1)
        assert "jax_bnar_linear" not in primitives(gradient, *given)
        assert hlo_calls(gradient, *given) == {f"jax_bnar_{name}_v1": 1 for name in names}


def test_forward_alone_holds_no_tangent() -> None:
    function, given = jax.jit(fused()), operands(CASE)
    assert ours(function, *given) == {"forward": 1}
    assert not [name for name in primitives(function, *given) if name.startswith("jax_bnar")]
    assert hlo_calls(function, *given) == {"jax_bnar_forward_v1": 1}


@one_or_two_inputs
def test_linearized_function_reads_the_residuals_of_backward(form: Form) -> None:
    """It keeps one mask and every x, and does not run forward again for each tangent."""
    given = tuple(operands(Case((8, 6, 5), form=form)))
    _, linear = jax.linearize(fused(form=form, save="mask"), *given)
    size = 8 * 6 * 5
    saved = [leaf for leaf in jax.tree.leaves(linear) if leaf.size > 5]
    expected = [size // 8, *[size * 4] * inputs_of(form)]
    assert sorted(leaf.nbytes for leaf in saved) == expected
    assert ours(linear, *given) == {}


@one_or_two_inputs
def test_derivative_of_a_derivative_keeps_the_kernels(form: Form) -> None:
    """At second order, forward and backward run once each; the rest is pure JAX."""
    x, *others = of(form)

    def loss(x: Any, *rest: Any) -> Any:
        return (fused(form=form)(x, *rest)[0] ** 2).sum()

    def product(x: Any) -> Any:
        return jax.jvp(lambda x: jax.grad(loss)(x, *others), (x,), (x,))

    names = [operation_of(form, name) for name in ("forward", "backward")]
    assert ours(product, x) == dict.fromkeys(names, 1)


@both_implementations
@pytest.mark.parametrize("axis_name", [None, "batch"])
@pytest.mark.parametrize("which", ["y", "var", "statistics alone", "derivative of the gradient"])
def test_what_a_tangent_has_in_common_cancels(
    implementation: Implementation, axis_name: str | None, which: str
) -> None:
    """The mean is rounded, so that x-mean has a sum, which would multiply it."""
    random = np.random.default_rng(0)
    x, x_dot = (1000 + random.standard_normal((2, 2, 32, 8))).astype(np.float32)

    def ours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        options: dict[str, Any] = {"implementation": implementation, "axis_name": axis_name}
        if which == "statistics alone":
            return x, jax_bnar.batch_statistics(x, **options).var
        y, _, var = jax_bnar.batch_norm(x, None, None, **options)
        return y, var

    def in_jnp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def mean_of(array: jax.Array) -> jax.Array:
            mean = array.mean(0, keepdims=True)
            return mean if axis_name is None else jax.lax.pmean(mean, axis_name)

        centred = x - mean_of(x)
        var = mean_of(centred**2)
        return centred * jax.lax.rsqrt(var + 1e-5), var[0]

    def moved(function: Any, x: Any, x_dot: Any) -> jax.Array:
        every = jax.vmap(function, axis_name="batch")
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(every(x)[0])))
        differentiated = gradient if which == "derivative of the gradient" else every
        dots = jax.jit(lambda x, x_dot: jax.jvp(differentiated, (x,), (x_dot,))[1])(x, x_dot)
        return dots if differentiated is gradient else dots[which != "y"]

    exact = np.asarray(moved(in_jnp, x.astype(np.float64), x_dot.astype(np.float64)))
    size = np.max(np.abs(exact))
    of_plain, of_ours = (
        np.max(np.abs(np.asarray(moved(function, x, x_dot)) - exact)) for function in (in_jnp, ours)
    )
    assert of_ours <= 2 * of_plain + 1e-5 * size
