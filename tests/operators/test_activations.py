"""`bn_act`: every activation against NumPy in float64, forward and backward, in every dtype.

Its transformations are those of every operator: `test_transformation_properties.py`, where it is
the kind "activations". `test_bad_input.py` has errors of other arguments.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_cases import ACTIVATIONS, ON_CUDA, PIECEWISE, REPRESENTATIVES, check
from cases import Case, all_dtypes, both_implementations, cases, operands
from hypothesis import example, given, settings
from jax.sharding import PartitionSpec as P
from programs import ours
from sharding_tools import collectives, make_mesh, put
from tiers import slow_except

from jax_bnar import (
    batch_norm,
    bn_act,
    bn_act_inference,
    bn_add_relu,
    bn_relu,
    dual_bn_act,
    dual_bn_act_inference,
    dual_bn_add_relu,
    dual_bn_add_relu_inference,
)
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
# `make check` takes the others as well.
representatives = pytest.mark.parametrize("name", slow_except(REPRESENTATIVES, ACTIVATIONS))


@both_implementations
@every_activation
@settings(max_examples=6)
@given(case=cases())
# One value for each channel, whose e is rounded.
@example(case=Case((1, 1), axis=0, dtype="float16", form="bn_add_relu", seed=1))
def test_agrees_with_oracle(implementation: Implementation, name: str, case: Case) -> None:
    check(case, name, implementation)


@both_implementations
@all_dtypes
@every_activation
@pytest.mark.parametrize("form", ["bn_relu", "bn_add_relu", "dual_bn_add_relu"])
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(("shape", "axis"), [((9, 5, 33), -1), ((3, 17, 70), 1)])
def test_every_dtype(
    shape: tuple[int, ...],
    axis: int,
    save: str,
    form: Any,
    name: str,
    dtype: str,
    implementation: Implementation,
) -> None:
    """With and without a residual or a second input, rows with a ragged end and planes with one."""
    check(Case(shape, axis, dtype, form, save=save, seed=3), name, implementation)


@both_implementations
@all_dtypes
@pytest.mark.parametrize("form", ["bn_relu", "bn_add_relu", "dual_bn_add_relu"])
@pytest.mark.parametrize(("shape", "axis"), [((9, 5, 33), -1), ((3, 17, 70), 1)])
def test_no_activation(
    shape: tuple[int, ...], axis: int, form: Any, dtype: str, implementation: Implementation
) -> None:
    """With a residual it is the linear bottleneck of MobileNetV2, with two inputs NASNet's pair."""
    check(Case(shape, axis, dtype, form, seed=3), "identity", implementation)


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_without_an_activation_backward_gives_dy_for_the_residual(out_dtype: Any) -> None:
    """It is one call each way, which keeps x alone and writes dx alone."""
    if ON_CUDA and out_dtype is not None:
        pytest.skip("CUDA has no kernel for that")
    x, z, scale, bias = operands(Case((64, 4, 16), dtype="bfloat16"))
    z = np.asarray(z, out_dtype or z.dtype)
    dy = np.cos(np.arange(z.size)).reshape(z.shape).astype(z.dtype)

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return bn_act(x, scale, bias, None, z=z, out_dtype=out_dtype).y

    def backward(*given: Any) -> Any:
        return jax.vjp(function, *given)[1](dy)

    given = (x, z, scale, bias)
    y, vjp = jax.vjp(function, *map(jnp.asarray, given))
    assert y.dtype == z.dtype
    assert [leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.ndim > 2] == [x.shape]
    dx, dz, *_ = vjp(jnp.asarray(dy))
    assert (dx.dtype, dz.dtype) == (x.dtype, z.dtype)
    np.testing.assert_array_equal(dz, dy)
    assert ours(backward, *given) == {"forward": 1, "backward": 1}
    assert "has_z=True" not in str(jax.make_jaxpr(backward)(*given)).partition("bnar_backward")[2]
    wide = given if out_dtype is None else (np.asarray(x, out_dtype), *given[1:])
    separate = batch_norm(wide[0], scale, bias).y.astype(jnp.float32) + z.astype(np.float32)
    np.testing.assert_allclose(y.astype(jnp.float32), separate, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["silu", "relu6"])
def test_other_activations_do_not_widen(name: str) -> None:
    x, _, scale, bias = operands(Case((6, 4), dtype="bfloat16"))
    operators: tuple[Any, ...] = (bn_act, ()), (bn_act_inference, (np.zeros(4), np.ones(4)))
    for function, statistics in operators:
        vectors = [np.float32(vector) for vector in (scale, bias, *statistics)]
        with pytest.raises(ValueError, match=f"with activation '{name}', got float32 .* instead"):
            function(x, *vectors, name, out_dtype="float32")
        assert function(x, *vectors, name, out_dtype="bfloat16") is not None


@both_implementations
@representatives
@pytest.mark.parametrize("has_z", [False, True])
def test_inference(has_z: bool, name: str, implementation: Implementation) -> None:
    x, z, scale, bias = operands(Case((7, 3, 5), seed=1))
    z = z if has_z else None
    mean, var = np.linspace(-1, 1, 5, dtype=np.float32), np.linspace(0.5, 3, 5, dtype=np.float32)
    options: dict[str, Any] = {"z": z, "implementation": implementation}

    def function(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        return bn_act_inference(x, scale, bias, mean, var, ACTIVATIONS[name], **options)

    def formula(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        each = (jnp.broadcast_to(v, x.shape) for v in (scale, bias, mean, var))
        scale, bias, mean, var = each
        u = (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias
        return ACTIVATIONS[name](u if z is None else u + z.astype(u.dtype))

    given_arrays = (x, scale, bias, mean, var)
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), given_arrays)
    np.testing.assert_allclose(function(*given_arrays), formula(*wide), rtol=1e-5, atol=1e-5)
    weights = np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(f: Any, *at: Any) -> Any:
        def weighted(*at: Any) -> jax.Array:
            return (f(*at) * weights.astype(at[0].dtype)).sum()

        return jax.grad(weighted, (0, 1, 2, 3, 4))(*at)

    actual, expected = gradients(function, *given_arrays), gradients(formula, *wide)
    for own, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)


def two_inputs(shape: tuple[int, ...], axis: int) -> list[np.ndarray]:
    """x1, x2, and scale, bias, mean and var of each; no value before an activation is at a jump."""
    random = np.random.default_rng(7)
    x = [random.normal(size=shape) for _ in range(2)]
    vectors = [random.uniform(0.5, 2, shape[axis]) for _ in range(8)]
    return [array.astype(np.float32) for array in (*x, *vectors)]


def join(name: str, axis: int, *arrays: Any) -> Any:
    """The formula with given statistics, and with those of the batch if there are none."""
    x1, x2, *vectors = (jnp.asarray(array, jnp.float64) for array in arrays)
    over = tuple(a for a in range(x1.ndim) if a != axis % x1.ndim)
    if len(vectors) == 4:
        vectors += [f(x, over) for x in (x1, x2) for f in (jnp.mean, jnp.var)]
    scale1, bias1, scale2, bias2, mean1, var1, mean2, var2 = (
        jnp.expand_dims(vector, over) for vector in vectors
    )
    u = (x1 - mean1) / jnp.sqrt(var1 + 1e-5) * scale1 + bias1
    u += (x2 - mean2) / jnp.sqrt(var2 + 1e-5) * scale2 + bias2
    return ACTIVATIONS.get(name, jax.nn.identity)(u)


@both_implementations
@pytest.mark.parametrize("name", [*ACTIVATIONS, "identity"])
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("given_statistics", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((9, 5, 33), -1), ((3, 17, 70), 1)])
def test_two_inputs(
    shape: tuple[int, ...],
    axis: int,
    given_statistics: bool,
    save: Any,
    name: str,
    implementation: Implementation,
) -> None:
    arrays = two_inputs(shape, axis)[: 10 if given_statistics else 6]
    options: Any = {"axis": axis, "implementation": implementation}

    def function(*arrays: Any) -> Any:
        if given_statistics:
            return dual_bn_act_inference(*arrays, activation=act, **options)
        return dual_bn_act(*arrays, activation=act, save=save, **options).y

    act = ACTIVATIONS.get(name, jax.nn.identity)
    formula = functools.partial(join, name, axis)
    y, vjp = jax.vjp(jax.jit(function), *arrays)
    exact, exact_vjp = jax.vjp(formula, *(jnp.asarray(a, jnp.float64) for a in arrays))
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    dy = np.cos(np.arange(y.size)).reshape(shape).astype(np.float32)
    for own, other in zip(vjp(dy), exact_vjp(dy.astype(np.float64)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)


def test_two_inputs_with_relu_or_nothing() -> None:
    """With ReLU it is `dual_bn_add_relu`, and with nothing the sum of two norms."""
    arrays = two_inputs((6, 4), -1)
    jax.tree.map(
        np.testing.assert_array_equal,
        (
            tuple(dual_bn_act(*arrays[:6], activation="relu")),
            dual_bn_act_inference(*arrays, activation=jax.nn.relu),
        ),
        (tuple(dual_bn_add_relu(*arrays[:6])), dual_bn_add_relu_inference(*arrays)),
    )
    x1, x2, scale1, bias1, scale2, bias2 = arrays[:6]
    y = batch_norm(x1, scale1, bias1).y + batch_norm(x2, scale2, bias2).y
    np.testing.assert_allclose(
        dual_bn_act(*arrays[:6], activation="none").y, y, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", slow_except((*REPRESENTATIVES, "none"), (*ACTIVATIONS, "none")))
def test_two_inputs_are_one_call_each_way(name: str) -> None:
    """Nothing is kept but x1 and x2."""
    x1, x2, *vectors = (jnp.asarray(array) for array in two_inputs((16, 4, 16), -1)[:6])

    def loss(x1: Any, x2: Any, *vectors: Any) -> Any:
        return dual_bn_act(x1, x2, *vectors, activation=ACTIVATIONS.get(name)).y.sum()

    every = tuple(range(6))
    assert ours(jax.grad(loss, every), x1, x2, *vectors) == {"dual_forward": 1, "dual_backward": 1}
    _, vjp = jax.vjp(loss, x1, x2, *vectors)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= x1.size]
    assert len(kept) == 2
    for own, x in zip(kept, (x1, x2), strict=True):
        np.testing.assert_array_equal(own, x)


SPELLINGS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.swish,
    "hard_swish": jax.nn.hard_swish,
    "hard_silu": jax.nn.hard_silu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": functools.partial(jax.nn.elu, alpha=1.0),
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "mish": jax.nn.mish,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_names_and_functions_are_the_same(name: str) -> None:
    x, _, scale, bias = operands(Case((6, 4)))
    by_name, by_function = (bn_act(x, scale, bias, act).y for act in (name, SPELLINGS[name]))
    np.testing.assert_array_equal(by_name, by_function)


def test_with_relu_or_nothing_it_is_the_other_operators() -> None:
    x, z, scale, bias = operands(Case((6, 4)))
    for other, own in (
        (bn_add_relu(x, z, scale, bias), bn_act(x, scale, bias, "relu", z=z)),
        (bn_relu(x, scale, bias), bn_act(x, scale, bias, jax.nn.relu)),
        (batch_norm(x, scale, bias), bn_act(x, scale, bias, "none")),
        (batch_norm(x, scale, bias), bn_act(x, scale, bias, None)),
        (batch_norm(x, scale, bias), bn_act(x, scale, bias, jax.nn.identity)),
    ):
        jax.tree.map(np.testing.assert_array_equal, tuple(own), tuple(other))


@representatives
@pytest.mark.parametrize("has_z", [False, True])
def test_it_is_one_call_each_way(has_z: bool, name: str) -> None:
    x, z, scale, bias = operands(Case((8, 4, 16)))

    def loss(x: Any, scale: Any, bias: Any) -> Any:
        return bn_act(x, scale, bias, ACTIVATIONS[name], z=z if has_z else None).y.sum()

    assert ours(loss, x, scale, bias) == {"forward": 1}
    assert ours(jax.grad(loss, (0, 1, 2)), x, scale, bias) == {"forward": 1, "backward": 1}


@representatives
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("has_z", [False, True])
def test_backward_keeps_nothing_from_before_the_activation(
    has_z: bool, save: Any, name: str
) -> None:
    """It keeps x, and with a residual y, a mask or z."""
    x, z, scale, bias = (jnp.asarray(a) for a in operands(Case((64, 4, 16))))

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        residual = z if has_z else None
        return bn_act(x, scale, bias, ACTIVATIONS[name], z=residual, save=save).y

    y, vjp = jax.vjp(function, x, z, scale, bias)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == x.shape]
    expected = [x]
    if has_z and name not in PIECEWISE:
        expected.append(z)
    elif has_z and save == "y":
        expected.append(y)
    assert len(kept) == len(expected)
    for own in kept:
        assert any(np.array_equal(own, other) for other in expected)
    masks = [leaf.nbytes for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.uint8]
    assert masks == ([x.size // 8] if has_z and save == "mask" and name in PIECEWISE else [])


@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("name", ["silu", "relu6"])
def test_sharded(name: str, has_z: bool) -> None:
    """Statistics are those of the whole batch, and no array is gathered."""
    x, z, scale, bias = (jnp.asarray(a) for a in operands(Case((16, 3, 8))))
    mesh = make_mesh("auto", data=8)

    def loss(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = bn_act(x, scale, bias, ACTIVATIONS[name], z=z if has_z else None).y
        return (y * jnp.cos(y)).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    expected = gradient(x, z, scale, bias)
    sharded = [put(a, mesh, P("data")) for a in (x, z)]
    actual = gradient(*sharded, scale, bias)
    for own, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    found = [c.opcode for each in collectives(gradient, *sharded, scale, bias) for c in each]
    assert set(found) == {"all-reduce"}


@representatives
def test_gpus_run_kernels_and_tpus_pure_jax(name: str) -> None:
    x = jnp.ones((4, 3), jnp.float32)

    def lowered(platform: str) -> str:
        step = jax.jit(jax.grad(lambda x: bn_act(x, None, None, ACTIVATIONS[name]).y.sum()))
        return step.trace(x).lower(lowering_platforms=(platform,)).as_text()

    for_gpus = lowered("cuda")
    assert for_gpus.count("@jax_bnar_forward_v1") == for_gpus.count("@jax_bnar_backward_v1") == 1
    assert f'activation = "{name}"' in for_gpus
    assert "jax_bnar" not in lowered("tpu")

    def of_two(platform: str) -> str:
        nothing = (None,) * 4
        step = jax.jit(lambda x: dual_bn_act(x, x, *nothing, activation=ACTIVATIONS[name]).y)
        return step.trace(x).lower(lowering_platforms=(platform,)).as_text()

    for_gpus = of_two("cuda")
    assert for_gpus.count("@jax_bnar_dual_forward_v1") == 1
    assert f'activation = "{name}"' in for_gpus
    assert "jax_bnar" not in of_two("tpu")


@pytest.mark.parametrize(
    ("activation", "error", "words"),
    [
        ("celu", ValueError, "must be 'none', 'relu', 'relu6'.*got 'celu'"),
        (jax.nn.celu, TypeError, r"apply another function to the result of activation='none'\.$"),
        (functools.partial(jax.nn.elu, alpha=2.0), TypeError, "alpha=2.0.* an ELU must be 1"),
        (functools.partial(jax.nn.elu, alpha=np.ones(3)), TypeError, "alpha=array"),
        (
            functools.partial(jax.nn.leaky_relu, negative_slope=1.5),
            TypeError,
            "or the function of jax.nn of that name.* a leaky ReLU is a Python number from 0",
        ),
    ],
)
def test_other_activations_are_refused(activation: Any, error: Any, words: str) -> None:
    x = jnp.ones((4, 3), jnp.float32)
    with pytest.raises(error, match=f"bn_act: activation .*{words}"):
        bn_act(x, None, None, activation)
    with pytest.raises(error, match=f"bn_act_inference: activation .*{words}"):
        bn_act_inference(x, None, None, jnp.ones(3), jnp.ones(3), activation)
    nothing = (None,) * 4
    with pytest.raises(error, match=f"dual_bn_act: activation .*{words}"):
        dual_bn_act(x, x, *nothing, activation=activation)
    given: Any = (x, x, *nothing, *[jnp.ones(3)] * 4)
    with pytest.raises(error, match=f"dual_bn_act_inference: activation .*{words}"):
        dual_bn_act_inference(*given, activation=activation)


def test_a_slope_may_be_a_number_of_numpy() -> None:
    x = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3) - 5
    given = [
        bn_act(x, None, None, functools.partial(jax.nn.leaky_relu, negative_slope=slope))[0]
        for slope in (np.float32(0.25), np.float64(0.25), 0.25)
    ]
    np.testing.assert_array_equal(given[0], given[2])
    np.testing.assert_array_equal(given[1], given[2])


@functools.partial(jax.jit, static_argnums=0)
def gradients_of(function: Any, x: jax.Array, z: jax.Array, dy: jax.Array) -> tuple[Any, Any]:
    return jax.vjp(function, x, z)[1](dy)


@both_implementations
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(
    ("slope", "dtype"),
    [(0.0, jnp.float32), (-0.0, jnp.float32), (1e-41, jnp.float32), (0.01, jnp.float16)],
)
def test_derivative_of_a_leaky_relu_whose_y_rounds_to_zero(
    slope: float, dtype: Any, save: Any, implementation: Implementation
) -> None:
    """The sign of a y that is 0 tells on which side of 0 it comes from."""
    act = functools.partial(jax.nn.leaky_relu, negative_slope=slope)
    x = jnp.zeros((16, 4), dtype)
    below = -jnp.finfo(dtype).smallest_subnormal.astype(dtype) if slope else jnp.asarray(-1, dtype)
    z = jnp.where(jnp.arange(64).reshape(16, 4) % 3 == 0, below, 1 - below).at[0, 0].set(0)
    options: Any = {"save": save, "implementation": implementation}

    def training(x: jax.Array, z: jax.Array) -> jax.Array:
        return bn_act(x, None, None, act, z=z, **options)[0]

    def inference(x: jax.Array, z: jax.Array) -> jax.Array:
        ones = jnp.ones(4)
        return bn_act_inference(x, None, None, 0 * ones, ones, act, z=z)

    expected = jnp.where(z < 0, jnp.asarray(slope, dtype), jnp.ones_like(z))
    for function in (training, inference):
        _, dz = gradients_of(function, x, z, jnp.ones_like(z))
        np.testing.assert_array_equal(dz, expected)


@both_implementations
def test_derivative_of_a_leaky_relu_of_zero(implementation: Implementation) -> None:
    """It is 1 as in `jax.nn`, also of the negative 0 that a negative scale makes of a mean."""
    x, scale = jnp.ones((8, 4)), -jnp.ones(4)

    def e(bias: jax.Array, z: jax.Array | None) -> jax.Array:
        return bn_act(x, scale, bias, "leaky_relu", z=z, implementation=implementation)[0].sum()

    for z in (None, -jnp.zeros_like(x)):
        gradient = jax.jit(jax.grad(e))(-jnp.zeros(4), z)
        np.testing.assert_array_equal(gradient, jnp.full(4, 8.0))


@both_implementations
@pytest.mark.parametrize("shape", [(32, 16), (2, 16, 50)])
@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("cotangent", [np.inf, np.nan])
def test_a_closed_relu6_stops_every_cotangent(
    cotangent: float, has_z: bool, shape: tuple[int, ...], implementation: Implementation
) -> None:
    random = np.random.default_rng(0)
    x, z = (jnp.asarray(4 * random.normal(size=shape), jnp.float32) for _ in range(2))
    z = z if has_z else jnp.zeros_like(x)

    def apply(x: jax.Array, z: jax.Array) -> jax.Array:
        residual = z if has_z else None
        return bn_act(
            x, None, None, "relu6", z=residual, axis=1, implementation=implementation
        )[0]  # fmt: skip

    y = jax.jit(apply)(x, z)
    closed = (y == 0) | (y == 6)
    assert 0 < closed.sum() < closed.size
    given = gradients_of(apply, x, z, jnp.where(closed, cotangent, 1.0).astype(x.dtype))
    expected = gradients_of(apply, x, z, jnp.where(closed, 0.0, 1.0).astype(x.dtype))
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@both_implementations
@every_activation
def test_second_derivatives(name: str, implementation: Implementation) -> None:
    """Those of `jax.nn`, also at 0, where formulas have two branches."""
    u = jnp.asarray([[-9.0], [-5.0], [-2.0], [-0.5], [-1e-4], [0.0], [1e-4], [0.5], [2.0], [9.0]])
    x = jnp.zeros_like(u)

    def function(z: jax.Array) -> jax.Array:
        y = bn_act(x, None, None, ACTIVATIONS[name], z=z, implementation=implementation)[0]
        return y.sum()

    actual = jax.jit(lambda u: jax.jvp(jax.grad(function), (u,), (jnp.ones_like(u),))[1])(u)
    expected = jax.jit(jax.vmap(jax.vmap(jax.grad(jax.grad(ACTIVATIONS[name])))))(u)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)


@both_implementations
def test_hard_silu_of_infinity(implementation: Implementation) -> None:
    x = jnp.zeros((4, 1))
    z = jnp.asarray([[np.inf], [-np.inf], [1.0], [-1.0]], x.dtype)

    def apply(x: jax.Array, z: jax.Array) -> jax.Array:
        return bn_act(x, None, None, "hard_silu", z=z, implementation=implementation)[0]

    _, dz = gradients_of(apply, x, z, jnp.ones_like(z))
    np.testing.assert_allclose(dz, jax.vmap(jax.vmap(jax.grad(jax.nn.hard_silu)))(z), rtol=1e-6)


@both_implementations
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_far_away(name: str, implementation: Implementation) -> None:
    """They are those of the straight lines that every activation becomes."""
    x = jnp.zeros((4, 1), jnp.float32)
    z = jnp.asarray([[np.inf], [-np.inf], [1e30], [-1e30]], x.dtype)

    def apply(x: jax.Array, z: jax.Array) -> jax.Array:
        return bn_act(x, None, None, name, z=z, implementation=implementation)[0]

    _, dz = gradients_of(apply, x, z, jnp.ones_like(z))
    right = 0.0 if name == "relu6" else 1.0
    left = 0.01 if name == "leaky_relu" else 0.0
    expected = np.array([right, left, right, left])
    # There, e^x times 0 is NaN, as it is in jax.grad of jax.nn's own.
    known = slice(2 if name in ("silu", "mish") else 0, 4)
    np.testing.assert_allclose(dz[known, 0], expected[known], rtol=1e-6, atol=0)
