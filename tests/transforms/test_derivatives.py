"""Forward mode and higher derivatives, which cost first-order reverse mode nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, both_implementations, operands, unfused
from programs import hlo_calls, ours, primitives
from trees import assert_trees_close

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

CASE = Case((4, 3, 2), dtype="float64", scale_dtype="float64", bias_dtype="float64", seed=3)
EVERYTHING = (0, 1, 2, 3)
saves = pytest.mark.parametrize("save", ["y", "mask"])


def fused(implementation: Implementation = None, **keywords: Any) -> Any:
    def function(*given: Any) -> tuple[Any, ...]:
        return tuple(jax_bnar.bn_add_relu(*given, implementation=implementation, **keywords))

    return function


def plain(*given: Any) -> tuple[Any, ...]:
    return tuple(unfused(*given))


def tangents(given: Any, seed: int = 5) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal(array.shape).astype(array.dtype) for array in given)


@both_implementations
@saves
def test_jvp_and_linearize(implementation: Implementation, save: Save) -> None:
    """Tangents of y, mean and var."""
    given = tuple(operands(CASE))
    moved = tangents(given)
    function = fused(implementation, save=save)
    expected = jax.jvp(plain, given, moved)
    assert_trees_close(jax.jvp(function, given, moved), expected, tolerance=1e-10)
    value, linear = jax.linearize(jax.jit(function), *given)
    assert_trees_close((value, linear(*moved)), expected, tolerance=1e-10)


@pytest.mark.parametrize("form", ["bn_relu", "batch_norm"])
def test_jvp_without_residual(form: str) -> None:
    """The gate is recovered from x, or there is none."""
    x, _, scale, bias = operands(CASE)

    def expected(x: Any, scale: Any, bias: Any) -> Any:
        mean, var = x.mean((0, 1)), x.var((0, 1))
        wide = [jnp.broadcast_to(v, x.shape) for v in (mean, var, scale, bias)]
        y = wide[2] * (x - wide[0]) * jax.lax.rsqrt(wide[1] + 1e-5) + wide[3]
        return jax.nn.relu(y) if form == "bn_relu" else y, mean, var

    given = (x, scale, bias)
    actual = jax.jvp(lambda *g: tuple(getattr(jax_bnar, form)(*g)), given, tangents(given))
    assert_trees_close(actual, jax.jvp(expected, given, tangents(given)), tolerance=1e-10)


@pytest.mark.parametrize("absent", [(), (2,), (3,), (2, 3)], ids=["all", "scale", "bias", "both"])
@pytest.mark.parametrize("moving", EVERYTHING)
def test_jvp_in_one_operand(absent: tuple[int, ...], moving: int) -> None:
    """The other tangents are symbolic zeros, and scale and bias may be None."""
    given = [None if i in absent else array for i, array in enumerate(operands(CASE))]
    if moving in absent:
        return

    def along(function: Any) -> Any:
        def of_one(array: Any) -> Any:
            return function(*(array if i == moving else other for i, other in enumerate(given)))

        primal = given[moving]
        assert primal is not None
        return jax.jvp(of_one, (primal,), tangents((primal,)))

    assert_trees_close(along(fused(save="mask")), along(plain), tolerance=1e-10)


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
            y, mean, var = function(*given)
            return (y**3).sum() + (mean * var).sum()

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
@pytest.mark.parametrize("order", ["rev-rev", "fwd-rev", "rev-fwd", "fwd-fwd"])
def test_hessian_vector_products(implementation: Implementation, order: str) -> None:
    given = tuple(operands(CASE))
    moved = tangents(given)

    def product(function: Any) -> Any:
        def loss(*given: Any) -> Any:
            y, mean, var = function(*given)
            return (y**3).sum() + (mean * var).sum()

        def slope(*given: Any) -> Any:
            return jax.jvp(loss, given, moved)[1]

        if order == "rev-fwd":
            return jax.grad(slope, EVERYTHING)(*given)
        if order == "fwd-rev":
            return jax.jvp(jax.grad(loss, EVERYTHING), given, moved)[1]
        if order == "fwd-fwd":
            return jax.jvp(slope, given, tangents(given, seed=6))[1]

        def along(*given: Any) -> Any:
            pairs = zip(jax.grad(loss, EVERYTHING)(*given), moved, strict=True)
            return sum((gradient * direction).sum() for gradient, direction in pairs)

        return jax.grad(along, EVERYTHING)(*given)

    actual = jax.jit(lambda: product(fused(implementation, save="mask")))()
    assert_trees_close(actual, jax.jit(lambda: product(plain))(), tolerance=1e-8)


def test_third_order() -> None:
    x, z, scale, bias = map(jnp.asarray, operands(CASE))

    def third(function: Any) -> Any:
        def loss(factor: Any) -> Any:
            y, _, var = function(x * factor, z, scale, bias)
            return (y**3).sum() + (var**2).sum()

        return jax.jit(jax.grad(jax.grad(jax.grad(loss))))

    np.testing.assert_allclose(third(fused())(1.3), third(plain)(1.3), rtol=1e-9)


def test_inference_forward_mode() -> None:
    x, z, scale, bias = operands(CASE)
    given = (x, z, scale, bias, np.array([0.1, -0.2]), np.array([1.0, 2.0]))

    def expected(x: Any, z: Any, *vectors: Any) -> Any:
        scale, bias, mean, var = (jnp.broadcast_to(v, x.shape) for v in vectors)
        return jax.nn.relu(scale * (x - mean) * jax.lax.rsqrt(var + 1e-5) + bias + z)

    actual = jax.jvp(jax_bnar.bn_add_relu_inference, given, tangents(given))
    assert_trees_close(actual, jax.jvp(expected, given, tangents(given)), tolerance=1e-10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tangent_is_rounded_once(dtype: str) -> None:
    """Like y, the tangent is as close to float64 as the unfused one."""
    case = Case((64, 3, 5), dtype=dtype)
    given = tuple(operands(case))
    moved = tangents(given)
    wide = [tuple(a.astype(np.float64) for a in arrays) for arrays in (given, moved)]
    exact = jax.jvp(plain, wide[0], wide[1])[1]
    errors = []
    for function in (fused(), plain):
        y_dot, *_ = jax.jvp(function, given, moved)[1]
        assert y_dot.dtype == given[0].dtype
        # Elements whose pre-activation is at the kink may take either side.
        error = np.abs(np.asarray(y_dot, np.float64) - exact[0])
        errors.append(np.quantile(error, 0.95))
    assert errors[0] <= errors[1]


@saves
def test_first_order_is_two_kernels(save: Save) -> None:
    """Support for forward mode costs reverse mode nothing: no tangents are left in the program."""
    given = operands(Case((8, 6, 5)))

    def loss(*given: Any) -> Any:
        return fused(save=save)(*given)[0].sum()

    for gradient in (jax.grad(loss, EVERYTHING), jax.jit(jax.grad(jax.jit(loss), EVERYTHING))):
        assert ours(gradient, *given) == {"forward": 1, "backward": 1}
        assert "jax_bnar_linear" not in primitives(gradient, *given)
        assert hlo_calls(gradient, *given) == {"jax_bnar_forward_v1": 1, "jax_bnar_backward_v1": 1}


def test_forward_alone_holds_no_tangent() -> None:
    function, given = jax.jit(fused()), operands(CASE)
    assert ours(function, *given) == {"forward": 1}
    assert not [name for name in primitives(function, *given) if name.startswith("jax_bnar")]
    assert hlo_calls(function, *given) == {"jax_bnar_forward_v1": 1}


def test_linearized_function_reads_the_residuals_of_backward() -> None:
    """It keeps one mask and x, and does not run forward again for each tangent."""
    given = tuple(operands(Case((8, 6, 5))))
    _, linear = jax.linearize(fused(save="mask"), *given)
    size = given[0].size
    saved = [leaf for leaf in jax.tree.leaves(linear) if leaf.size > 5]
    assert sorted(leaf.nbytes for leaf in saved) == [size // 8, size * 4]
    assert ours(linear, *given) == {}


def test_derivative_of_a_derivative_keeps_the_kernels() -> None:
    """At second order, forward and backward run once each; the rest is pure JAX."""
    given = operands(CASE)

    def loss(x: Any, *rest: Any) -> Any:
        return (fused()(x, *rest)[0] ** 2).sum()

    def product(x: Any) -> Any:
        return jax.jvp(lambda x: jax.grad(loss)(x, *given[1:]), (x,), (x,))

    assert ours(product, given.x) == {"forward": 1, "backward": 1}
