"""Paddle's `fused_bn_add_activation`: six results, four gradients, one call each way."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, all_dtypes, as_dtype, both_implementations, cases, cotangents, operands
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from programs import hlo_calls, ours, stablehlo_calls
from property_tests import example_count

import jax_bnar
from jax_bnar import ops
from jax_bnar._base.implementation import Implementation

MOMENTUM = 0.75


def running(case: Case, dtype: str = "float32") -> tuple[Any, Any]:
    random = np.random.default_rng(case.seed + 2)
    mean = random.standard_normal(case.channels)
    return as_dtype(mean, dtype), as_dtype(random.uniform(0.5, 2, case.channels), dtype)


def keywords(case: Case, **more: Any) -> dict[str, Any]:
    axis = case.axis if case.axis < 0 else case.axis - len(case.shape)
    data_format = "NHWC" if axis == -1 else "NCHW"
    return {"epsilon": case.epsilon, "momentum": MOMENTUM, "data_format": data_format, **more}


def check(
    case: Case, implementation: Implementation, unbiased: bool, running_dtype: str = "float32"
) -> None:
    x, z, scale, bias = operands(case)
    mean, variance = running(case, running_dtype)
    statics = keywords(case, unbiased_running_variance=unbiased, implementation=implementation)
    dy = cotangents(case).y

    @jax.jit
    def both(given: Any, dy: Any) -> Any:
        def relu_out(x: Any, z: Any, scale: Any, bias: Any) -> Any:
            result = ops.fused_bn_add_activation(x, z, scale, bias, mean, variance, **statics)
            return result.relu_out, result

        _, vjp, result = jax.vjp(relu_out, *given, has_aux=True)
        by_operator = ops.fused_bn_add_activation_grad(
            *(x, scale, bias, None, result.saved_mean, result.saved_variance),
            *(result.reserve_space, dy),
            data_format=statics["data_format"],
            implementation=implementation,
        )
        by_relu_out = ops.fused_bn_add_activation_grad(
            *(x, scale, bias, result.relu_out, result.saved_mean, result.saved_variance),
            *(None, dy),
            data_format=statics["data_format"],
            implementation=implementation,
        )
        return result, vjp(dy), by_operator, by_relu_out

    result, gradients, by_operator, by_relu_out = jax.tree.map(
        np.asarray, both((x, z, scale, bias), dy)
    )
    wide = case.statistics_dtype
    assert [array.dtype for array in result] == [
        *(x.dtype, running_dtype, running_dtype, wide, wide, "uint8")
    ]
    assert [array.shape for array in result[:5]] == [x.shape, *[(case.channels,)] * 4]

    exact = oracle.forward(x, z, scale, bias, epsilon=case.epsilon, axis=case.axis)
    oracle.assert_within("relu_out", result.relu_out, exact.y, exact.y_allowance)
    oracle.assert_within("saved_mean", result.saved_mean, exact.mean, exact.mean_allowance)
    # saved_variance is the inverse standard deviation: half the relative error of the variance.
    rstd = 1 / np.sqrt(exact.var + case.epsilon)
    unit = oracle.unit_roundoff(wide)
    allowance = rstd * (rstd**2 * exact.var_allowance / 2 + oracle.ROUNDINGS * unit)
    oracle.assert_within("saved_variance", result.saved_variance, rstd, allowance)
    count = x.size // case.channels
    factor = count / max(count - 1, 1) if unbiased else 1
    for name, got, old, new, error in (
        ("mean_out", result.mean_out, mean, exact.mean, exact.mean_allowance),
        (
            *("variance_out", result.variance_out, variance),
            *(factor * exact.var, factor * exact.var_allowance),
        ),
    ):
        old = old.astype(exact.mean.dtype)
        moved = MOMENTUM * old + (1 - MOMENTUM) * new
        roundings = oracle.ROUNDINGS * unit * (np.abs(old) + np.abs(new))
        roundings = roundings + oracle.rounding(moved, running_dtype)
        oracle.assert_within(name, got, moved, error + roundings)
    bits = np.unpackbits(result.reserve_space.ravel(), bitorder="little")
    np.testing.assert_array_equal(bits[: x.size], (result.relu_out > 0).ravel())
    assert not bits[x.size :].any()

    expected = oracle.backward(
        *(dy, x, result.relu_out, scale, None, None),
        epsilon=case.epsilon,
        axis=case.axis,
    )
    for found in (
        dict(zip(("dx", "dz", "dscale", "dbias"), gradients, strict=True)),
        *(
            {"dx": g.x_grad, "dz": g.z_grad, "dscale": g.scale_grad, "dbias": g.bias_grad}
            for g in (by_operator, by_relu_out)
        ),
    ):
        np.testing.assert_array_equal(found["dz"], expected.dz)
        for name in ("dx", "dscale", "dbias"):
            if found[name] is None:  # no such operand
                continue
            rounding = oracle.rounding(getattr(expected, name), found[name].dtype)
            allowance = getattr(expected, f"{name}_allowance") + rounding
            oracle.assert_within(name, found[name], getattr(expected, name), allowance)
    assert by_operator.scale_grad.dtype == (wide if scale is None else scale.dtype)
    assert by_operator.bias_grad.dtype == (wide if bias is None else bias.dtype)


@both_implementations
@all_dtypes
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("unbiased", [False, True])
def test_agrees_with_the_oracle(
    implementation: Implementation, dtype: str, axis: int, unbiased: bool
) -> None:
    """Paddle's operator supports only float16, NHWC and multiples of four channels."""
    shape = (4, 7, 5, 33) if axis == -1 else (4, 33, 7, 5)
    check(Case(shape, axis, dtype), implementation, unbiased)


@both_implementations
@settings(max_examples=example_count(5))
@given(
    case=cases(), unbiased=st.booleans(), dtype=st.sampled_from(["float32", "float64", "bfloat16"])
)
def test_any_case(implementation: Implementation, case: Case, unbiased: bool, dtype: str) -> None:
    """Any rank, number of channels and dtypes of parameters, even one element per channel."""
    shape, axis = list(case.shape), case.axis % len(case.shape)
    channels = shape.pop(axis)
    axis = -1 if axis != 1 else 1
    shape = (*shape, channels) if axis == -1 else (shape[0], channels, *shape[1:])
    case = dataclasses.replace(case, shape=shape, axis=axis, form="bn_add_relu", num_groups=1)
    check(case, implementation, unbiased, dtype)


def test_one_element_to_a_channel() -> None:
    """In this case Paddle divides by n-1 = 0."""
    case = Case((1, 5))
    result = ops.fused_bn_add_activation(
        *operands(case), *running(case), momentum=0.5, unbiased_running_variance=True
    )
    np.testing.assert_array_equal(result.variance_out, running(case)[1] / 2)


def test_defaults_are_paddles() -> None:
    case = Case((3, 5, 4))
    result = ops.fused_bn_add_activation(*operands(case), *running(case))
    other = ops.fused_bn_add_activation(
        *operands(case), *running(case), momentum=0.9, epsilon=1e-5, data_format="NHWC"
    )
    jax.tree.map(np.testing.assert_array_equal, result, other)


@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 5, 33), -1), ((4, 33, 6, 5), 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_forward_and_one_backward(shape: tuple[int, ...], axis: int, dtype: str) -> None:
    case = Case(shape, axis, dtype)
    given = operands(case)
    mean, variance = running(case)
    statics = keywords(case, implementation="ffi")

    def training_step(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        result = ops.fused_bn_add_activation(x, z, scale, bias, mean, variance, **statics)
        # A training step returns the running statistics besides the loss.
        return jnp.square(result.relu_out.astype(jnp.float32)).sum(), result

    def gradient(*given: Any) -> Any:
        return jax.value_and_grad(training_step, argnums=(0, 1, 2, 3), has_aux=True)(*given)

    def explicit(x: Any, scale: Any, bias: Any, dy: Any) -> Any:
        vector, mask = jnp.ones_like(scale), jnp.zeros(result.reserve_space.shape, jnp.uint8)
        return ops.fused_bn_add_activation_grad(
            *(x, scale, bias, None, vector, vector, mask, dy),
            data_format=statics["data_format"],
            implementation="ffi",
        )

    result = training_step(*given)[1]
    forward, backward = {"jax_bnar_forward_v1": 1}, {"jax_bnar_backward_v1": 1}
    for count in (stablehlo_calls, hlo_calls):
        assert count(training_step, *given) == forward
        assert count(gradient, *given) == forward | backward
        assert count(explicit, given.x, given.scale, given.bias, given.x) == backward
    assert ours(gradient, *given) == {"forward": 1, "backward": 1}


def test_gradient_through_all_results() -> None:
    """Gradients of a loss that uses the statistics equal those of plain JAX in float64."""
    case = Case((3, 4, 7), dtype="float64", scale_dtype="float64", bias_dtype="float64")
    given = operands(case)
    mean, variance = running(case, "float64")
    random = np.random.default_rng(5)
    weights = [random.standard_normal(shape) for shape in (case.shape, *[(7,)] * 4)]

    def of(results: Any) -> Any:
        return sum((a * w).sum() for a, w in zip(results[:5], weights, strict=True))

    def fused(*six: Any) -> Any:
        return of(ops.fused_bn_add_activation(*six, unbiased_running_variance=True))

    def plain(x: Any, z: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        batch, var = x.mean((0, 1)), x.var((0, 1))
        rstd = 1 / jnp.sqrt(var + 1e-5)
        wide = [jnp.broadcast_to(v, x.shape) for v in (batch, rstd, scale, bias)]
        y = jax.nn.relu((x - wide[0]) * wide[1] * wide[2] + wide[3] + z)
        moved = 0.9 * mean + 0.1 * batch, 0.9 * variance + 0.1 * 12 / 11 * var
        return of((y, *moved, batch, rstd))

    for found, exact in zip(
        *(jax.grad(f, argnums=tuple(range(6)))(*given, mean, variance) for f in (fused, plain)),
        strict=True,
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-11)


def test_exported_with_symbolic_sizes() -> None:
    """Its reserve_space has another shape, but the same bytes, and serves the gradient as well."""
    case = Case((4, 3, 5, 8))
    x, z, scale, bias = operands(case)
    operands_of_all = (x, z, scale, bias, *running(case))

    def forward(*given: Any) -> Any:
        return tuple(
            ops.fused_bn_add_activation(*given, **keywords(case, unbiased_running_variance=True))
        )

    symbolic = export.symbolic_args_specs(
        operands_of_all, ("b, h, w, c", "b, h, w, c", "c", "c", "c", "c")
    )
    program = export.export(jax.jit(forward), disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS)(
        *symbolic
    )
    results, expected = program.call(*operands_of_all), forward(*operands_of_all)
    for left, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.ravel(left), np.ravel(right), rtol=1e-5, atol=1e-6)
    _, _, _, mean, variance, mask = results
    dy = cotangents(case).y
    gradients = (
        ops.fused_bn_add_activation_grad(
            x, scale, bias, None, mean, variance, reserve_space, dy, data_format="NHWC"
        )
        for reserve_space in (mask, expected[-1])
    )
    for left, right in zip(*gradients, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_under_vmap() -> None:
    case = Case((3, 4, 5, 7))
    x, z, scale, bias = operands(case)
    mean, variance = running(case)

    def both(x: Any, z: Any) -> Any:
        result = ops.fused_bn_add_activation(x, z, scale, bias, mean, variance)
        return result, ops.fused_bn_add_activation_grad(
            *(x, scale, bias, None, *result[3:], z),
        )

    mapped = jax.vmap(both)(x, z)
    one_by_one = [both(x[i], z[i]) for i in range(3)]
    stacked = jax.tree.map(lambda *each: np.stack(each), *one_by_one)
    for found, expected in zip(*map(jax.tree.leaves, (mapped, stacked)), strict=True):
        np.testing.assert_allclose(
            found.astype(np.float32), expected.astype(np.float32), rtol=1e-5, atol=1e-6
        )
    assert ours(jax.vmap(both), x, z) == {"forward": 1, "backward": 1}


def test_sharded_batch() -> None:
    """Statistics are those of the whole batch, however it is sharded."""
    case = Case((8, 3, 3, 16))
    x, z, scale, bias = operands(case)
    mean, variance = running(case)
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("batch"))

    @jax.jit
    def both(x: Any, z: Any) -> Any:
        result = ops.fused_bn_add_activation(x, z, scale, bias, mean, variance)
        return result, ops.fused_bn_add_activation_grad(x, scale, bias, None, *result[3:], z)

    whole = both(x, z)
    sharded = both(*(jax.device_put(a, sharding) for a in (x, z)))
    assert sharded[0].relu_out.sharding.is_equivalent_to(sharding, 4)
    for found, expected in zip(*map(jax.tree.leaves, (sharded, whole)), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"z": None}, TypeError, "z must be an array"),
        ({"z": jnp.ones((2, 3), jnp.float32)}, ValueError, "not broadcast"),
        ({"mean": None}, TypeError, "mean must be an array"),
        ({"unbiased_running_variance": "no"}, TypeError, "unbiased_running_variance must be True"),
        ({"variance": jnp.ones(4, jnp.int32)}, TypeError, "variance must have a float dtype"),
        ({"scale": jnp.ones(5, jnp.float32)}, ValueError, r"scale must have shape \(4,\)"),
        ({"momentum": 1.5}, ValueError, "momentum is the weight of the old running value"),
        (
            {"momentum": "0.9"},
            TypeError,
            "momentum must be a number from 0 to 1, got '0.9' of type str",
        ),
        ({"momentum": float("nan")}, ValueError, "momentum"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be finite and > 0"),
        ({"act_type": "gelu"}, ValueError, "act_type must be 'relu', got 'gelu'"),
        ({"data_format": "NCX"}, ValueError, "data_format must be 'NHWC' or 'NCHW', got 'NCX'"),
        ({"data_format": []}, ValueError, "data_format must be"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = Case((3, 5, 4))
    x, z, scale, bias = operands(case)
    mean, variance = running(case)
    named = {"x": x, "z": z, "scale": scale, "bias": bias, "mean": mean, "variance": variance}
    with pytest.raises(error, match=f"^fused_bn_add_activation: .*{message}"):
        ops.fused_bn_add_activation(**named | change)


def test_refuses_a_traced_momentum() -> None:
    case = Case((3, 5, 4))
    with pytest.raises(TypeError, match="momentum must be a static Python number"):
        jax.jit(lambda m: ops.fused_bn_add_activation(*operands(case), *running(case), momentum=m))(
            0.9
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reserve_space": None}, TypeError, "one of reserve_space and relu_out"),
        ({"reserve_space": jnp.ones((1, 7), jnp.uint8)}, ValueError, r"must have shape \(1, 8\)"),
        ({"reserve_space": jnp.ones((1, 8), jnp.int32)}, TypeError, "must have dtype uint8"),
        ({"reserve_space": 3}, TypeError, "reserve_space must be an array, got int"),
        ({"saved_variance": None}, TypeError, "saved_variance must be an array"),
        ({"relu_out_grad": jnp.ones((3, 5, 4), jnp.bfloat16)}, TypeError, "cast it with"),
    ],
)
def test_gradient_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x = jnp.ones((3, 5, 4), jnp.float32)
    vector = jnp.ones(4, jnp.float32)
    named = {
        **dict.fromkeys(("scale", "bias", "saved_mean", "saved_variance"), vector),
        "x": x,
        "relu_out_grad": x,
        "relu_out": None,
        "reserve_space": jnp.zeros((1, 8), jnp.uint8),
    }
    with pytest.raises(error, match=f"^fused_bn_add_activation_grad: .*{message}"):
        ops.fused_bn_add_activation_grad(**named | change)
