"""`fold_batch_norms` of single layers: every kind of sum with a weight, every spelling."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fold_tools import folded, runs_each_time
from jax import lax
from property_tests import example_count

import jax_bnar

C = 6


def variables(kernel: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(7), 6)
    vectors = {
        name: jax.random.normal(key, (C,), jnp.float32) + 0.5
        for name, key in zip(["scale", "bias", "mean", "conv_bias"], keys, strict=False)
    }
    vectors["var"] = jax.random.uniform(keys[4], (C,), jnp.float32, 0.3, 3.0)
    return {**vectors, "kernel": jax.random.normal(keys[5], kernel, dtype)}


def images(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape, dtype)


def normalised(y: jax.Array, w: Any, axis: int = -1) -> jax.Array:
    shape = [1] * y.ndim
    shape[axis] = C
    mean, var, scale, bias = (w[name].reshape(shape) for name in ("mean", "var", "scale", "bias"))
    return (y - mean) * (lax.rsqrt(var + 1e-3) * scale) + bias


def conv(numbers: tuple[str, str, str], **options: Any) -> Callable[..., jax.Array]:
    spatial = len(numbers[0]) - 2
    given = {"window_strides": (1,) * spatial, "padding": "SAME", **options}
    return lambda w, x: lax.conv_general_dilated(x, w["kernel"], dimension_numbers=numbers, **given)


NHWC = ("NHWC", "HWIO", "NHWC")
SUMS: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], tuple[int, ...], int]] = {
    "convolution": (conv(NHWC), (3, 3, 4, C), (2, 5, 5, 4), -1),
    "NCHW": (conv(("NCHW", "OIHW", "NCHW")), (C, 4, 3, 3), (2, 4, 5, 5), 1),
    "channels come last": (conv(("NCHW", "OIHW", "NHWC")), (C, 4, 3, 3), (2, 4, 5, 5), -1),
    "one dimension": (conv(("NWC", "WIO", "NWC")), (3, 4, C), (2, 5, 4), -1),
    "three dimensions": (conv(("NDHWC", "DHWIO", "NDHWC")), (2, 2, 2, 4, C), (2, 3, 3, 3, 4), -1),
    "strided": (conv(NHWC, window_strides=(2, 2)), (3, 3, 4, C), (2, 6, 6, 4), -1),
    "dilated": (conv(NHWC, rhs_dilation=(2, 2)), (3, 3, 4, C), (2, 6, 6, 4), -1),
    "transposed": (
        conv(NHWC, lhs_dilation=(2, 2), padding=[(1, 2), (1, 2)]),
        (3, 3, 4, C),
        (2, 4, 4, 4),
        -1,
    ),
    "depthwise": (conv(NHWC, feature_group_count=C), (3, 3, 1, C), (2, 5, 5, C), -1),
    "groups": (conv(NHWC, feature_group_count=2), (3, 3, 2, C), (2, 5, 5, 4), -1),
    "groups of the batch": (conv(NHWC, batch_group_count=2), (3, 3, 4, C), (4, 5, 5, 4), -1),
    "product": (lambda w, x: x @ w["kernel"], (4, C), (3, 4), -1),
    "weight on the left": (lambda w, x: w["kernel"] @ x, (C, 4), (4, 3), 0),
    "einsum": (lambda w, x: jnp.einsum("bij,jc->bic", x, w["kernel"]), (4, C), (2, 3, 4), -1),
    "einsum, channels first": (
        lambda w, x: jnp.einsum("bij,cj->bci", x, w["kernel"]),
        (C, 4),
        (2, 3, 4),
        1,
    ),
}


@pytest.mark.parametrize("training", [False, np.bool_(False)])
@pytest.mark.parametrize("choose", ["where", "cond"])
def test_statistics_that_a_constant_chooses(choose: str, training: Any) -> None:
    w, x = variables((3, 3, 4, C)), images((2, 5, 5, 4))

    def network(w: Any, x: Any) -> Any:
        y = conv(NHWC)(w, x)

        def batch() -> Any:
            return y.mean((0, 1, 2)), y.var((0, 1, 2))

        def given() -> Any:
            return w["mean"], w["var"]

        if choose == "where":
            mean, var = jax.tree.map(lambda a, b: jnp.where(training, a, b), batch(), given())
        else:
            mean, var = lax.cond(training, batch, given)
        return jax.nn.relu(normalised(y, {**w, "mean": mean, "var": var}))

    assert "folded into the convolution" in str(folded(network, w, x).report)


def test_statistics_that_nobody_reads() -> None:
    """tf2jax computes them in evaluation, too."""
    w, x = variables((3, 3, 4, C)), images((2, 5, 5, 4))

    def network(w: Any, x: Any) -> Any:
        y = conv(NHWC)(w, x)
        y.mean((0, 1, 2))
        y.var((0, 1, 2))
        return jax.nn.relu(normalised(y, w))

    assert "folded into the convolution" in str(folded(network, w, x).report)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_sum_with_a_weight(name: str, dtype: str) -> None:
    layer, kernel, shape, axis = SUMS[name]

    def net(w: Any, x: jax.Array) -> jax.Array:
        given = {key: value.astype(x.dtype) for key, value in w.items() if key != "kernel"}
        return jax.nn.relu(normalised(layer(w, x), given, axis))

    x = images(shape, dtype)
    network = folded(net, variables(kernel, dtype), x)
    assert len(network.report.folded) == 1
    assert not network.report.refused
    assert not runs_each_time(network, x) & {"rsqrt", "mul", "sub"}
    assert sorted(array.shape for array in network.variables) == sorted([(C,), kernel])


def _inverse(w: Any) -> jax.Array:
    return w["scale"] / jnp.sqrt(w["var"] + 1e-3)


def _along(w: Any, name: str) -> jax.Array:
    return w[name].reshape(1, 1, 1, C)


SPELLINGS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "centred, times the root": lambda w, y: normalised(y, w),
    "factor and offset": lambda w, y: (
        y * _inverse(w).reshape(1, 1, 1, C)
        + (w["bias"] - w["mean"] * _inverse(w)).reshape(1, 1, 1, C)
    ),
    "divided by the root": lambda w, y: (
        (y - _along(w, "mean")) / jnp.sqrt(_along(w, "var") + 1e-3) * _along(w, "scale")
        + _along(w, "bias")
    ),
    "no scale or bias": lambda w, y: (y - _along(w, "mean")) * lax.rsqrt(_along(w, "var") + 1e-3),
    "the mean minus the array": lambda w, y: (_along(w, "mean") - y) * -_along(w, "scale"),
    "after a bias": lambda w, y: normalised(y + _along(w, "conv_bias"), w),
    "after numbers": lambda w, y: normalised(y * 0.5 - 3.0, w),
    "transposed in between": lambda w, y: normalised(y.transpose(0, 3, 1, 2), w, 1),
    "flattened": lambda w, y: normalised(y.reshape(1, *y.shape)[0], w),
    "rows": lambda w, y: normalised(y.reshape(-1, C), w),
    "other axes": lambda w, y: normalised(y.reshape(1, 25, 2, C), w).reshape(y.shape),
    "our operator": lambda w, y: jax_bnar.batch_norm_inference(
        y, w["scale"], w["bias"], w["mean"], w["var"]
    ),
    "our operator, no scale": lambda w, y: jax_bnar.batch_norm_inference(
        y, None, None, w["mean"], w["var"], epsilon=0.1
    ),
    "our operator with ReLU": lambda w, y: jax_bnar.bn_relu_inference(
        y, w["scale"], w["bias"], w["mean"], w["var"]
    ),
    "our operator, channels first": lambda w, y: jax_bnar.bn_relu_inference(
        y.transpose(0, 3, 1, 2), w["scale"], w["bias"], w["mean"], w["var"], axis=1
    ),
    "our operator in pure JAX": lambda w, y: jax_bnar.bn_relu_inference(
        y, w["scale"], w["bias"], w["mean"], w["var"], implementation="xla"
    ),
    "our operator in pure JAX, channels first": lambda w, y: jax_bnar.bn_relu_inference(
        *(y.transpose(0, 3, 1, 2), w["scale"], w["bias"], w["mean"], w["var"]),
        axis=1,
        implementation="xla",
    ),
    "our operator for each example": lambda w, y: jax.vmap(
        lambda y: jax_bnar.bn_relu_inference(y, w["scale"], w["bias"], w["mean"], w["var"])
    )(y),
    "our operator with a residual": lambda w, y: jax_bnar.bn_add_relu_inference(
        y, jnp.cos(jnp.ones_like(y)), w["scale"], w["bias"], w["mean"], w["var"]
    ),
    "jax.nn.standardize": lambda w, y: jax.nn.standardize(
        y, -1, _along(w, "mean"), _along(w, "var")
    ),
    "an inner jit": lambda w, y: jax.jit(normalised)(y, w),
    "jax.checkpoint": lambda w, y: jax.checkpoint(normalised)(y, w),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name: str) -> None:
    def net(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(SPELLINGS[name](w, conv(NHWC)(w, x)))

    x = images((2, 5, 5, 4))
    network = folded(net, variables((3, 3, 4, C)), x)
    assert len(network.report.folded) == 1, network.report
    assert not network.report.refused, network.report
    assert not runs_each_time(network, x) & {"rsqrt", "sqrt", "sub", "div"}
    assert sorted(array.shape for array in network.variables) == [(3, 3, 4, C), (C,)]


_STEPS = {"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide}


@pytest.mark.slow
@hypothesis.settings(max_examples=example_count(25))
@hypothesis.given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(_STEPS)), st.booleans(), st.booleans()), max_size=6
    ),
    shape=st.sampled_from([(3, 4), (2, 3, 4), (1, 4), (1, 1, 4), (2, 1, 4)]),
)
def test_any_chain(steps: list[tuple[str, bool, bool]], shape: tuple[int, ...]) -> None:
    """Each step has an operation, a vector or a number, and the order of its operands."""
    rng = np.random.default_rng(0)
    vectors = [rng.uniform(0.5, 2.0, (C,)).astype(np.float32) for _ in steps]
    w = {"kernel": rng.normal(size=(4, C)).astype(np.float32), "vectors": vectors}

    def net(w: Any, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, w["kernel"])
        for (name, is_vector, is_first), vector in zip(steps, w["vectors"], strict=True):
            row = jnp.asarray(vector).reshape((1,) * (y.ndim - 1) + (C,))
            other: Any = row if is_vector else 1.5
            is_last = name == "div" or is_first
            y = _STEPS[name](y, other) if is_last else _STEPS[name](other, y)
        return y

    multiplies = any(name in ("mul", "div") and is_vector for name, is_vector, _ in steps)
    network = folded(net, w, images(shape))
    assert len(network.report.folded) == multiplies


def test_the_weight_is_rounded_once() -> None:
    """The kernel is cast to bfloat16 by the program; the factor multiplies what it was before."""
    w = variables((4, C))

    def net(w: Any, x: jax.Array) -> jax.Array:
        return normalised((x @ w["kernel"].astype(jnp.bfloat16)).astype(jnp.float32), w)

    network = jax_bnar.fold_batch_norms(net, w, images((3, 4), jnp.bfloat16))
    (kernel,) = (array for array in network.variables if array.ndim == 2)
    factor = w["scale"] / jnp.sqrt(w["var"] + 1e-3)
    exact = np.asarray(w["kernel"], np.float64) * np.asarray(factor, np.float64)
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(kernel, np.float64), exact, rtol=2**-8 * 1.001)


def test_what_depends_on_the_variables_alone_runs_once() -> None:
    """Standardised weights, and the transposition of another kernel, are among the variables."""

    def net(w: Any, x: jax.Array) -> jax.Array:
        kernel = (w["kernel"] - w["kernel"].mean((0, 1, 2), keepdims=True)) / w["kernel"].std(
            (0, 1, 2), keepdims=True
        )
        y = normalised(conv(NHWC)({"kernel": kernel}, x), w)
        return jax.nn.relu(y) @ jnp.exp(w["head"]).T

    w = {**variables((3, 3, 4, C)), "head": images((2, C))}
    x = images((2, 5, 5, 4))
    network = folded(net, w, x)
    assert len(network.report.folded) == 1
    assert not runs_each_time(network, x) & {"exp", "transpose", "reduce_sum", "sqrt"}


def test_another_batch_size_and_transformations() -> None:
    def net(w: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(normalised(conv(NHWC)(w, x), w))

    w, x = variables((3, 3, 4, C)), images((8, 5, 5, 4))
    network = jax_bnar.fold_batch_norms(net, w, x[:2])
    expected = net(w, x)
    for size in (0, 1, 3, 8):
        y = jax.jit(network.apply)(network.variables, x[:size])
        np.testing.assert_allclose(y, expected[:size], rtol=1e-5, atol=1e-5)
    mapped = jax.vmap(network.apply, (None, 0))(network.variables, x.reshape(4, 2, 5, 5, 4))
    np.testing.assert_allclose(mapped.reshape((*x.shape[:-1], C)), expected, rtol=1e-5, atol=1e-5)

    def total(function: Any, weights: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(function(weights, x))))(x)

    ours, theirs = total(network.apply, network.variables), total(net, w)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(-1, 5, 5, C), (-1, C), (-1, 25, C)])
def test_a_batch_of_any_size_is_exported(shape: tuple[int, ...]) -> None:
    def net(w: Any, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(normalised(conv(NHWC)(w, x).reshape(shape), w))
        return y.reshape(-1, 5, 5, C) + w["bias"].reshape(1, 1, 1, C)

    w, x = variables((3, 3, 4, C)), images((3, 5, 5, 4))
    network = jax_bnar.fold_batch_norms(net, w, x)
    assert len(network.report.folded) == 1
    (size,) = jax.export.symbolic_shape("b")
    batch = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in network.variables]
    exported = jax.export.export(jax.jit(network.apply))(tuple(shapes), batch)
    y = exported.call(network.variables, x)
    np.testing.assert_allclose(y, net(w, x), rtol=1e-5, atol=1e-5)


def test_arguments_that_are_no_arrays() -> None:
    def net(w: Any, x: jax.Array, *, form: str, train: bool) -> dict[str, Any]:
        assert not train
        return {form: normalised(x @ w["kernel"], w), "form": form}

    w, x = variables((4, C)), images((3, 4))
    options = {"form": "logits", "train": False}
    network = jax_bnar.fold_batch_norms(net, w, x, **options)
    result = network.apply(network.variables, x, **options)
    assert result["form"] == "logits"
    expected = normalised(x @ w["kernel"], w)
    np.testing.assert_allclose(result["logits"], expected, rtol=1e-5, atol=1e-5)
