"""What `fold_batch_norms` leaves as it was, with the reason."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_tools import as_flax_needs_it
from fold_tools import W, X, assert_refused, norm
from jax import lax

import jax_bnar


def centred(y: jax.Array) -> jax.Array:
    return y - y.mean(0, keepdims=True)


def variance(y: jax.Array) -> jax.Array:
    return y.var(0, keepdims=True)


def by_the_batch(w: Any, x: jax.Array) -> jax.Array:
    y = x @ w["kernel"]
    return centred(y) * lax.rsqrt((centred(y) ** 2).mean(0, keepdims=True) + 1e-3)


def within(kind: str) -> Callable[[Any, jax.Array], jax.Array]:
    """A product and its norm in a loop, a branch, or a jit with a sharding."""

    def net(w: Any, x: jax.Array) -> jax.Array:
        def layer(y: jax.Array, w: Any = w) -> jax.Array:
            return norm(y[:, :4] @ w["kernel"], w)

        y = x @ w["kernel"]
        if kind == "calls in a scan":
            inner = jax.jit(jax.checkpoint(layer), donate_argnums=0)
            return lax.scan(lambda y, _: (inner(y), None), y, None, length=2)[0]
        if kind == "scan":
            return lax.scan(lambda y, _: (layer(y), None), y, None, length=2)[0]
        if kind == "scan over weights":
            many = {name: jnp.stack([w[name]] * 2) for name in ("kernel", "mean", "var")}
            return lax.scan(lambda y, w: (layer(y, w), None), y, many)[0]
        if kind == "while":
            return lax.while_loop(lambda y: jnp.sum(y) > 1e9, layer, y)
        if kind == "cond":
            return lax.cond(jnp.sum(x) > 0, layer, lambda y: y, y)
        return lax.cond(
            jnp.sum(x) > 0, lambda y: lax.fori_loop(0, 2, lambda _, y: layer(y), y), lambda y: y, y
        )

    return net


@jax.custom_vjp
def with_own_derivative(y: jax.Array, w: Any) -> jax.Array:
    return norm(y, w)


with_own_derivative.defvjp(
    lambda y, w: (norm(y, w), w), lambda w, dy: (dy, jax.tree.map(jnp.zeros_like, w))
)


def our_norm(y: jax.Array, w: Any, **options: Any) -> jax.Array:
    return jax_bnar.bn_relu_inference(y, None, None, w["mean"], w["var"], **options)


def across_the_batch(w: Any, x: jax.Array) -> jax.Array:
    """Each row is an example of its own, and the statistics are those of all."""
    return jax.vmap(
        lambda x: jax_bnar.bn_relu((x @ w["kernel"])[None], None, None, axis_name="batch")[0],
        axis_name="batch",
    )(x)


def read_twice(w: Any, x: jax.Array) -> jax.Array:
    y = x @ w["kernel"]
    return norm(y, w) + y


def along_the_rows(w: Any, x: jax.Array) -> jax.Array:
    return x @ w["kernel"] * lax.rsqrt(w["rows"] ** 2 + 1)


REFUSED: dict[str, tuple[Callable[[Any, jax.Array], jax.Array], str]] = {
    "statistics of the batch": (by_the_batch, "its statistics are those of the batch"),
    "statistics of the batch, divided by the root": (
        lambda w, x: centred(x @ w["kernel"]) / jnp.sqrt(variance(x @ w["kernel"]) + 1e-3),
        "its statistics are those of the batch",
    ),
    "statistics of the batch, by a power": (
        lambda w, x: centred(x @ w["kernel"]) * (variance(x @ w["kernel"]) + 1e-3) ** -0.5,
        "its statistics are those of the batch",
    ),
    "our training form": (
        lambda w, x: jax_bnar.batch_norm(x @ w["kernel"], None, None)[0],
        "its statistics are those of the batch",
    ),
    "our training form, with ReLU": (
        lambda w, x: jax_bnar.bn_relu(x @ w["kernel"], None, None)[0],
        "its statistics are those of the batch",
    ),
    "our training form in pure JAX": (
        lambda w, x: jax_bnar.bn_relu(x @ w["kernel"], None, None, implementation="xla")[0],
        "its statistics are those of the batch",
    ),
    "our training form, over a named axis": (
        across_the_batch,
        "its statistics are those of the batch",
    ),
    "our training form in a loop": (
        lambda w, x: lax.map(lambda x: jax_bnar.bn_relu(x @ w["kernel"], None, None)[0], x[None]),
        "its statistics are those of the batch",
    ),
    "our kernel": (
        lambda w, x: our_norm(x @ w["kernel"], w, implementation="ffi"),
        'implementation="ffi" asks for the kernel',
    ),
    "our operator in a loop": (
        lambda w, x: lax.map(lambda x: our_norm(x @ w["kernel"], w), x[None]),
        "it is in the body of a scan",
    ),
    "our operator in pure JAX, in a loop": (
        lambda w, x: lax.map(lambda x: our_norm(x @ w["kernel"], w, implementation="xla"), x[None]),
        "it is in the body of a scan",
    ),
    "a scan": (within("scan"), "it is in the body of a scan; a Python loop in its place"),
    "a scan over weights": (within("scan over weights"), "it is in the body of a scan"),
    "a while loop": (within("while"), "it is in the body of a while"),
    "a branch": (within("cond"), "it is in a branch of a cond"),
    "a loop in a branch": (within("loop in a branch"), "it is in the body of a scan"),
    "calls in a scan": (within("calls in a scan"), "it is in the body of a scan"),
    "single examples in a loop": (
        lambda w, x: lax.map(lambda x: norm(x[None] @ w["kernel"], w)[0], x),
        "it is in the body of a scan",
    ),
    "a vector in a loop": (
        lambda w, x: lax.map(lambda x: (x @ w["kernel"]) * lax.rsqrt(w["var"] + 1e-3), x),
        "it is in the body of a scan",
    ),
    "a function with a derivative of its own": (
        lambda w, x: with_own_derivative(x @ w["kernel"], w),
        "it is in a function with a derivative of its own (custom_vjp_call)",
    ),
    "a jit with an option": (
        lambda w, x: jax.jit(lambda y: norm(y, w), donate_argnums=0)(x @ w["kernel"]),
        "it is within a jit, which is left as it is",
    ),
    "the sum is read twice": (read_twice, "is used elsewhere as well"),
    "the sum is returned": (
        lambda w, x: (y := x @ w["kernel"], norm(y, w)),  # type: ignore[dict-item]
        "is used elsewhere as well",
    ),
    "no sum before it": (lambda w, x: norm(jnp.sin(x @ w["kernel"]), w), "comes from sin"),
    "an activation before it": (
        lambda w, x: norm(jax.nn.relu(x @ w["kernel"]), w),
        "comes from relu",
    ),
    "a sum of two products before it": (
        lambda w, x: norm(x @ w["kernel"] + (x * 2) @ w["kernel"], w),
        "comes from add",
    ),
    "an input before it": (
        lambda w, x: norm(jnp.tile(x[:, :2], (1, 3)), w),
        "not from a convolution or a matrix product",
    ),
    "a weight that is computed from the input": (
        lambda w, x: norm(x @ (w["kernel"] * x[0, 0]), w),
        "is not one of the variables",
    ),
    "vectors along what was an axis of the batch": (
        lambda w, x: norm((x[:2] @ w["kernel"]).reshape(2, 6).T.reshape(2, 6), w),
        "do not run along the channels",
    ),
    "vectors along another axis": (along_the_rows, "do not run along the channels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    net, reason = REFUSED[name]
    assert_refused(net, W, X, reason)


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 3)])
def test_a_reshape_that_transposes_first(shape: tuple[int, ...]) -> None:
    """Its shapes are those of one that does not, also where all axes have one length."""
    w = {"kernel": W["kernel"][:, :3], "var": jnp.arange(1.0, 7.0, dtype=jnp.float32)}

    def net(w: Any, x: jax.Array) -> jax.Array:
        y = x @ w["kernel"]  # (6, 3)
        last = w["var"][: shape[-1]].reshape((1,) * (len(shape) - 1) + (-1,))
        return lax.reshape(y, shape, dimensions=(1, 0)) * lax.rsqrt(last + 1e-3)

    x = jnp.concatenate([X, 2 * X])
    network = jax_bnar.fold_batch_norms(net, w, x)
    assert not network.report.folded
    y = network.apply(network.variables, x)
    np.testing.assert_allclose(y, net(w, x), rtol=1e-5, atol=1e-6)


ENLARGED: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "added to more rows": lambda w, x: (
        norm(x[:1] @ w["kernel"], w) + jnp.zeros((5, 6), jnp.float32)
    ),
    "multiplied by more rows": lambda w, x: (x[:1] @ w["kernel"]) * w["rows"] * w["mean"],
    "one channel becomes six": lambda w, x: (x @ w["kernel"][:, :1]) * w["mean"] + w["var"],
}


@pytest.mark.parametrize("name", ENLARGED)
def test_what_makes_the_sum_larger_is_no_part_of_it(name: str) -> None:
    net = ENLARGED[name]
    with jax.numpy_rank_promotion("allow"):
        network = jax_bnar.fold_batch_norms(net, W, X)
        y, expected = network.apply(network.variables, X), net(W, X)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "net",
    [
        nn.LayerNorm(),
        nn.LayerNorm(use_scale=False, use_bias=False),
        nn.GroupNorm(2),
        nn.InstanceNorm(),
        nn.RMSNorm(),
    ],
    ids=lambda net: type(net).__name__,
)
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 3, 6)])
def test_other_norms_are_no_batch_norm(net: nn.Module, shape: tuple[int, ...]) -> None:
    whole = nn.Sequential([nn.Dense(6), net])
    x = jnp.ones(shape, jnp.float32)
    with as_flax_needs_it():
        network = jax_bnar.fold_batch_norms(whole, whole.init(jax.random.key(0), x), x)
    assert network.report.layers == ()


def test_a_bias_is_no_batch_norm() -> None:
    network = jax_bnar.fold_batch_norms(lambda w, x: x @ w["kernel"] + 1 + w["mean"][None], W, X)
    assert network.report.layers == ()
    assert str(network.report) == "no BatchNorm in evaluation was found"
