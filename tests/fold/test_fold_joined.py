"""`fold_batch_norms` of a BatchNorm behind a concatenation of convolutions or matrix products."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax_tools import trained_looking
from fold_tools import X, assert_refused, folded, runs_each_time
from jax import lax

# The channels of the parts.
PARTS = (1, 4, 3)
C = sum(PARTS)
IMAGES = jax.random.normal(jax.random.key(0), (2, 6, 6, 5), jnp.float32)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


W = {
    "kernels": [
        normal(i, k, k, 5, c) for i, (k, c) in enumerate(zip((1, 3, 5), PARTS, strict=True))
    ],
    "biases": [normal(10 + i, c) for i, c in enumerate(PARTS)],
    "matrices": [normal(20 + i, 4, c) for i, c in enumerate(PARTS)],
    "mean": normal(30, C),
    "var": normal(31, C) ** 2 + 0.5,
    "bias": normal(32, C),
}


def norm(y: jax.Array, w: Any, axis: int = -1) -> jax.Array:
    shape = [1] * y.ndim
    shape[axis] = -1
    mean, var, bias = (w[name].reshape(shape) for name in ("mean", "var", "bias"))
    return (y - mean) * lax.rsqrt(var + 1e-3) + bias


def convolved(w: Any, x: jax.Array, numbers: Any = ("NHWC", "HWIO", "NHWC")) -> list[jax.Array]:
    return [
        lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        for kernel in w["kernels"]
    ]


def with_biases(w: Any, x: jax.Array) -> jax.Array:
    """A part without a bias among them."""
    first, *rest = convolved(w, x)
    biases = [bias.reshape(1, 1, 1, -1) for bias in w["biases"]]
    parts = [first, *(y + bias for y, bias in zip(rest, biases[1:], strict=True))]
    return norm(jnp.concatenate(parts, -1), w)


def norms_before(w: Any, x: jax.Array) -> jax.Array:
    """Each part has a norm of its own, too."""
    first, second, third = convolved(w, x)
    root = lax.rsqrt(w["var"][:4] + 1e-3).reshape(1, 1, 1, 4)
    return norm(jnp.concatenate([first, second * root, third * 2.0], -1), w)


def along_rows(w: Any, x: jax.Array) -> jax.Array:
    """One norm over what two products with as many channels make of different rows."""
    w = {**w, **{name: w[name][:4] for name in ("mean", "var", "bias")}}
    return norm(jnp.concatenate([x @ w["matrices"][1], x[1:] @ w["kernels"][1][0, 0, :4]], 0), w)


FORMS: dict[str, tuple[Callable[[Any, Any], jax.Array], jax.Array, int]] = {
    "convolutions": (lambda w, x: norm(jnp.concatenate(convolved(w, x), -1), w), IMAGES, 3),
    "channels first": (
        lambda w, x: norm(jnp.concatenate(convolved(w, x, ("NHWC", "HWIO", "NCHW")), 1), w, axis=1),
        IMAGES,
        3,
    ),
    "transposed before": (
        lambda w, x: norm(
            jnp.concatenate([y.transpose(0, 3, 1, 2) for y in convolved(w, x)], 1), w, axis=1
        ),
        IMAGES,
        3,
    ),
    "transposed and reshaped behind": (
        lambda w, x: norm(
            jnp.concatenate(convolved(w, x), -1).reshape(2, 36, C).transpose(0, 2, 1), w, axis=1
        ),
        IMAGES,
        3,
    ),
    "biases": (with_biases, IMAGES, 3),
    "norms before and behind": (norms_before, IMAGES, 3),
    "matrix products": (
        lambda w, x: norm(jnp.concatenate([x @ m for m in w["matrices"]], -1), w),
        X,
        3,
    ),
    "a product and a scaled one": (
        lambda w, x: norm(
            jnp.hstack([x @ w["matrices"][0], x @ w["matrices"][1] * 3.0]),
            {name: w[name][:5] for name in ("mean", "var", "bias")},
        ),
        X,
        2,
    ),
    "along the rows": (along_rows, X, 2),
    "one factor for all": (
        lambda w, x: jnp.concatenate(convolved(w, x), -1) * lax.rsqrt(w["var"][0] + 1e-3),
        IMAGES,
        3,
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forms(name: str, dtype: str) -> None:
    net, x, count = FORMS[name]

    def rounded(w: Any, x: jax.Array) -> jax.Array:
        return net(jax.tree.map(lambda a: a.astype(x.dtype), w), x)

    network = folded(rounded, W, x.astype(dtype))
    assert len(network.report.folded) == count, network.report
    assert not network.report.refused
    assert not runs_each_time(network, x.astype(dtype)) & {"rsqrt", "sub"}


def test_a_batch_of_another_size() -> None:
    net, x, _ = FORMS["convolutions"]
    network = folded(net, W, x)
    more = jnp.concatenate([x, -x, x])
    after, before = jax.jit(network.apply)(network.variables, more), jax.jit(net)(W, more)
    assert jnp.allclose(after, before, rtol=1e-5, atol=1e-4)


class MixedConvolutions(nn.Module):
    """MixNet's: depthwise convolutions of parts of the channels, by kernels of several sizes."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        parts = jnp.split(x, 2, -1)
        convolutions = [
            nn.Conv(part.shape[-1], (k, k), feature_group_count=part.shape[-1], use_bias=False)
            for k, part in zip((3, 5), parts, strict=True)
        ]
        y = jnp.concatenate([f(p) for f, p in zip(convolutions, parts, strict=True)], -1)
        return nn.silu(nn.BatchNorm(use_running_average=not train)(y))


def test_mixed_convolutions() -> None:
    x = normal(1, 2, 6, 6, 8)
    net = MixedConvolutions()
    variables = trained_looking(net.init(jax.random.key(0), x))
    network = folded(net.apply, variables, x)
    assert [layer.module for layer in network.report.layers] == [
        "MixedConvolutions/BatchNorm_0"
    ] * 2
    assert {layer.folded_into for layer in network.report.layers} == {"convolution"}


def beyond_float16(w: Any, x: jax.Array) -> jax.Array:
    """The factor of the second part is 1e5, and its weight cannot hold it."""
    factor = lax.rsqrt(w["var"].at[2].set(0.0) + 1e-10).reshape(1, 1, 1, C)
    narrow = {"kernels": [kernel.astype(jnp.float16) for kernel in w["kernels"]]}
    y = jnp.concatenate(convolved(narrow, x.astype(jnp.float16)), -1)
    return y.astype(jnp.float32) * factor


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a part is activated": (
        lambda w, x: norm(
            jnp.concatenate([*convolved(w, x)[:2], jax.nn.relu(convolved(w, x)[2])], -1), w
        ),
        "comes from relu",
    ),
    "a part is read elsewhere": (
        lambda w, x: (
            (parts := convolved(w, x)) and norm(jnp.concatenate(parts, -1), w) + parts[1].sum()
        ),
        "is used elsewhere as well",
    ),
    "a part is the input": (
        lambda w, x: norm(jnp.concatenate([*convolved(w, x)[:2], x[..., :3]], -1), w),
        "comes from slice",
    ),
    "a part is the same as another": (
        lambda w, x: norm(jnp.concatenate([convolved(w, x)[1]] * 2, -1), w),
        "is used elsewhere as well",
    ),
    "the parts are read together": (
        lambda w, x: norm(y := jnp.concatenate(convolved(w, x), -1), w) + y,
        "do not run along",
    ),
    "a weight would leave the range of its dtype": (beyond_float16, "range of float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    net, reason = REFUSED[name]
    assert_refused(net, W, IMAGES, reason)
