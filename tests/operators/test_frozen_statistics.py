"""Gradients of x and z alone, with given statistics: a network that is trained on frozen norms."""

import functools
import itertools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from activation_cases import ACTIVATIONS, JUMPS, value_and_derivative
from cases import all_dtypes, as_dtype, both_implementations
from jax.sharding import PartitionSpec as P
from programs import hlo_calls
from sharding_tools import collectives, make_mesh, put, use_mesh

import jax_bnar
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

NAMES = ("none", "relu", *ACTIVATIONS)
# With one input without and with a residual, and with two inputs.
FORMS = ("one", "residual", "two")
SHAPES = {"nhwc": ((6, 5, 33), -1), "nchw": ((3, 17, 10, 7), 1)}

every_form = pytest.mark.parametrize("form", FORMS)


class Arrays(NamedTuple):
    """The operands: those that are differentiated, and four frozen vectors for each input."""

    tensors: tuple[Any, ...]
    frozen: tuple[Any, ...]


def arrays(form: str, shape: tuple[int, ...], axis: int, dtype: str) -> Arrays:
    random = np.random.default_rng(5)
    tensors = tuple(as_dtype(random.normal(size=shape), dtype) for _ in range(1 + (form != "one")))
    wide = "float64" if dtype == "float64" else "float32"
    vectors = [random.uniform(0.5, 2, shape[axis]).astype(wide) for _ in range(8)]
    vectors[4] = -vectors[4]  # scale2
    return Arrays(tensors, tuple(vectors[: 8 if form == "two" else 4]))


def activation_of(name: str) -> Any:
    return ACTIVATIONS.get(name, name)


def function(form: str, name: str, axis: int, implementation: Implementation, frozen: Any) -> Any:
    """The operator as a function of its tensors."""
    options: dict[str, Any] = {"axis": axis, "implementation": implementation}
    one: Any = jax_bnar.bn_act_inference
    if form == "two":
        affine, statistics = (*frozen[0:2], *frozen[4:6]), (*frozen[2:4], *frozen[6:8])
        dual: Any = jax_bnar.dual_bn_act_inference
        activation = activation_of(name)
        return lambda *x: dual(*x, *affine, *statistics, activation=activation, **options)
    if name == "none":
        assert form == "one"
        return lambda x: jax_bnar.batch_norm_inference(x, *frozen, **options)
    return lambda x, z=None: one(x, *frozen, activation_of(name), z=z, **options)


def exact(form: str, name: str, axis: int, given: Arrays, dy: Any) -> tuple[Any, list[Any]]:
    """u and the gradients of the tensors, in float64."""
    wide = [np.asarray(each, np.float64) for each in given.tensors]
    shape = [1] * wide[0].ndim
    shape[axis] = -1
    vectors = [np.asarray(each, np.float64).reshape(shape) for each in given.frozen]
    scales, u = [], np.zeros_like(wide[0])
    for i, x in enumerate(wide if form == "two" else wide[:1]):
        scale, bias, mean, var = vectors[4 * i : 4 * i + 4]
        scales.append(scale / np.sqrt(var + 1e-5))
        u = u + (x - mean) * scales[-1] + bias
    if form == "residual":
        u = u + wide[1]
        scales.append(np.ones_like(scales[0]))
    if name == "none":
        derivative = np.ones_like(u)
    elif name == "relu":
        derivative = (u > 0).astype(u.dtype)
    else:
        derivative = value_and_derivative(name, u)[1]
    e = np.asarray(dy, np.float64) * derivative
    return u, [scale * e for scale in scales]


@both_implementations
@all_dtypes
@every_form
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(
    name: str, layout: str, form: str, dtype: str, implementation: Implementation
) -> None:
    if name == "none" and form != "one":
        pytest.skip("has another name")
    shape, axis = SHAPES[layout]
    given = arrays(form, shape, axis, dtype)
    dy = as_dtype(np.random.default_rng(6).normal(size=shape), dtype)
    of_tensors = function(form, name, axis, implementation, given.frozen)

    @jax.jit
    def gradients(tensors: Any, dy: Any) -> Any:
        return jax.vjp(of_tensors, *tensors)[1](dy)

    u, expected = exact(form, name, axis, given, dy)
    eps = oracle.unit_roundoff(jnp.dtype(dtype))
    jumps = {"relu": (0,), **JUMPS}.get(name, ())
    # The derivative is that of a value which may have been rounded to the other side of a jump.
    near = functools.reduce(np.logical_or, (abs(u - at) < 40 * eps for at in jumps), u != u)
    # u is computed from rounded operands, and the second derivative is at most about 1.2.
    of_u = 3 * np.abs(np.asarray(dy, np.float64)) * 16 * oracle.unit_roundoff(jnp.dtype("float32"))
    if dtype == "float64":
        of_u = of_u * 0
    for actual, wanted in zip(gradients(given.tensors, dy), expected, strict=True):
        assert actual.dtype == dy.dtype
        # e may be rounded to dz before it is multiplied.
        allowance = 4 * eps * np.abs(wanted) + of_u * 8 + 1e-7 * (dtype == "float16") + 1e-13
        oracle.assert_within("", *(np.where(near, 0, a) for a in (actual, wanted, allowance)))


@every_form
def test_infinite_x_behind_a_closed_gate(form: str) -> None:
    """dx does not depend on x there, so it is 0, and not NaN."""
    shape = (4, 9)
    given = arrays(form, shape, -1, "float32")
    x = given.tensors[0].copy()
    x[1] = -np.inf
    of_tensors = function(form, "relu", -1, None, given.frozen)
    y, pullback = jax.vjp(jax.jit(of_tensors), x, *given.tensors[1:])
    assert not y[1].any()
    for gradient in pullback(np.ones_like(y)):
        assert not gradient[1].any()
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("form", "name"),
    [("one", "none"), *itertools.product(("one", "residual", "two"), ("relu", "relu6"))],
)
def test_infinite_y(form: str, name: str) -> None:
    """The derivatives are those at a large number."""
    shape = (4, 9)
    given = arrays(form, shape, -1, "float32")
    of_tensors = function(form, name, -1, None, given.frozen)

    def derivatives(value: float) -> Any:
        x, *others = given.tensors
        tensors = [np.where(np.arange(4)[:, None] == 1, np.float32(value), x), *others]
        ones = [np.ones_like(tensor) for tensor in tensors]
        _, tangent = jax.jvp(jax.jit(of_tensors), tensors, ones)
        return tangent, jax.vjp(jax.jit(of_tensors), *tensors)[1](np.ones(shape, np.float32))

    jax.tree.map(np.testing.assert_array_equal, derivatives(np.inf), derivatives(1e6))


@every_form
def test_the_derivative_of_relu_where_y_is_nan(form: str) -> None:
    """It is 0, as that of `jax.nn.relu`."""
    given = arrays(form, (4, 9), -1, "float32")
    x, *others = given.tensors
    x = np.where(np.arange(4)[:, None] == 1, np.float32(np.nan), x)
    y, pullback = jax.vjp(function(form, "relu", -1, None, given.frozen), x, *others)
    assert np.isnan(y[1]).all()
    for gradient in pullback(np.ones_like(y)):
        assert not gradient[1].any()
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("form", "name", "dtype", "expected"),
    [
        ("one", "none", "float32", {"normalise": 1}),
        ("one", "relu", "float32", {"backward_apply": 1}),
        ("residual", "relu", "bfloat16", {"backward_apply": 1, "normalise": 1}),
        ("two", "relu", "float32", {"dual_backward_apply": 1}),
        ("one", "silu", "bfloat16", {"backward_apply": 1}),
        ("one", "silu", "float32", {}),
        ("residual", "silu", "float32", {}),
    ],
)
def test_calls(form: str, name: str, dtype: str, expected: dict[str, int]) -> None:
    """No sums are computed that nobody asks for."""
    shape = (4, 6, 16)
    given = arrays(form, shape, -1, dtype)
    of_tensors = function(form, name, -1, None, given.frozen)

    def backward(tensors: Any, dy: Any) -> Any:
        return jax.vjp(of_tensors, *tensors)[1](dy)

    def both(tensors: Any, dy: Any) -> Any:
        y, pullback = jax.vjp(of_tensors, *tensors)
        return y, pullback(dy)

    prefix = "dual_" if form == "two" else ""
    calls = hlo_calls(both, given.tensors, jnp.asarray(given.tensors[0]))
    forward = Counter({f"jax_bnar_{prefix}normalise_v1": 1})
    assert calls - forward == {f"jax_bnar_{each}_v1": count for each, count in expected.items()}
    assert calls & forward == forward


@every_form
@pytest.mark.parametrize(("name", "kept"), [("relu", 0), ("leaky_relu", 0), ("silu", 1)])
def test_x_is_kept_only_where_the_derivative_follows_from_it(
    form: str, name: str, kept: int
) -> None:
    given = arrays(form, (4, 6, 16), -1, "float32")
    of_tensors = function(form, name, -1, None, given.frozen)
    tensors = tuple(jnp.asarray(each) for each in given.tensors)
    _, pullback = jax.vjp(of_tensors, *tensors)
    found = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == (4, 6, 16)]
    assert len(found) == (1 if not kept else len(tensors))
    x = np.asarray(tensors[0])
    assert any(np.array_equal(leaf, x) for leaf in found) == bool(kept)


@pytest.mark.parametrize("name", ["relu", "silu"])
@every_form
def test_transformations(form: str, name: str) -> None:
    """The gradient under vmap, and its derivative, against those of the pure JAX form."""
    given = arrays(form, (4, 6, 16), -1, "float64")
    tensors = tuple(jnp.asarray(each) for each in given.tensors)

    def gradient(implementation: Implementation, *tensors: Any) -> Any:
        of_tensors = function(form, name, -1, implementation, given.frozen)
        every = tuple(range(len(tensors)))
        return jax.grad(lambda *t: (of_tensors(*t) ** 3).sum(), every)(*tensors)

    @functools.partial(jax.jit, static_argnums=0)
    def transformed(implementation: Implementation, *tensors: Any) -> Any:
        of_tensors = functools.partial(gradient, implementation)
        mapped = jax.vmap(of_tensors)(*(jnp.stack([each, 2 * each]) for each in tensors))
        _, dots = jax.jvp(of_tensors, tensors, tensors)
        again = jax.grad(lambda *t: sum((d**2).sum() for d in of_tensors(*t)))(*tensors)
        checkpointed = jax.checkpoint(of_tensors)(*tensors)
        return mapped, dots, again, checkpointed

    results = [transformed(implementation, *tensors) for implementation in (None, "xla")]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), *results)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@every_form
def test_sharded_gradients_need_no_communication(form: str, kind: Any) -> None:
    given = arrays(form, (8, 6, 16), -1, "float32")
    mesh = make_mesh(kind, d=8)
    of_tensors = function(form, "relu", -1, None, given.frozen)

    def gradients(*tensors: Any) -> Any:
        y, pullback = jax.vjp(of_tensors, *tensors)
        return pullback(y)

    expected = jax.jit(gradients)(*given.tensors)
    with use_mesh(mesh):
        tensors = tuple(put(each, mesh, P("d")) for each in given.tensors)
        actual = jax.jit(gradients)(*tensors)
        assert not collectives(gradients, *tensors)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
