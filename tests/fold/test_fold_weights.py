"""Which weights can hold the factor of a BatchNorm, and which are left as they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fold_tools import W, X, norm
from jax import lax

import jax_bnar


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16])
def test_a_weight_that_is_rounded_on_purpose(dtype: Any) -> None:
    """The program computes with rounded weights in float32."""

    def net(w: Any, x: jax.Array) -> jax.Array:
        return norm(x @ w["kernel"].astype(dtype).astype(jnp.float32), w)

    network = jax_bnar.fold_batch_norms(net, W, X)
    y = network.apply(network.variables, X)
    np.testing.assert_allclose(y, net(W, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "convolves"), [("int8", False), ("int4", False), ("bool", False), ("int8", True)]
)
def test_integer_weights_are_left(dtype: str, convolves: bool) -> None:
    """An integer cannot hold the factor."""
    w = W | {"kernel": jnp.asarray(np.arange(24).reshape(4, 6) % 5 - 2).astype(dtype)}

    def net(w: Any, x: jax.Array) -> jax.Array:
        if convolves:
            x, kernel = x[:, None, :], w["kernel"][None]
            y = lax.conv_general_dilated(
                x.astype(dtype),
                kernel,
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                preferred_element_type=jnp.float32,
            )[:, 0]
        else:
            y = lax.dot_general(
                x, w["kernel"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
        return norm(y, w)

    network = jax_bnar.fold_batch_norms(net, w, X)
    assert f"{dtype} weights or inputs cannot hold its factor" in str(network.report)
    assert not network.report.folded
    np.testing.assert_allclose(network.apply(network.variables, X), net(w, X), rtol=1e-5, atol=1e-6)


def test_float32_weights_whose_range_is_left() -> None:
    """The product of weight and factor overflows, but not what the network computes."""
    w = W | {"kernel": jnp.full((4, 6), 1e30, jnp.float32)}

    def net(w: Any, x: jax.Array) -> jax.Array:
        return (x @ w["kernel"]) * lax.rsqrt(1e-30 * w["var"].reshape(1, 6))

    x = jnp.full((3, 4), 1e-25, jnp.float32)
    network = jax_bnar.fold_batch_norms(net, w, x)
    (refused,) = network.report.refused
    assert "the folded weight would be infinite or NaN" in refused.reason
    np.testing.assert_allclose(network.apply(network.variables, x), net(w, x), rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "var"), [(300.0, 1e-6), (1e-3, 1e8)], ids=["overflow", "underflow"]
)
def test_float16_weights_whose_range_is_left(size: float, var: float) -> None:
    """The others of the network are folded."""
    kernel, more = (jax.random.normal(jax.random.key(k), (4, 6), jnp.float16) for k in (1, 2))
    w = W | {"kernel": size * kernel, "far": jnp.full(6, var, jnp.float32)}
    w["more"] = jnp.concatenate([more, more[:2]])

    def net(w: Any, x: jax.Array) -> jax.Array:
        y = (x @ w["kernel"]).astype(jnp.float32) * lax.rsqrt(w["far"].reshape(1, 6) + 1e-6)
        return norm((jnp.tanh(y).astype(jnp.float16) @ w["more"]).astype(jnp.float32), w)

    x = X.astype(jnp.float16) / 64
    network = jax_bnar.fold_batch_norms(net, w, x)
    (refused,), (folded,) = network.report.refused, network.report.folded
    assert "would leave the range of float16" in refused.reason
    assert folded.folded_into == "matrix product"
    y = network.apply(network.variables, x)
    np.testing.assert_allclose(y, net(w, x), rtol=0.01, atol=0.01)


def test_an_infinite_factor_is_left() -> None:
    """The variance of a dead channel, without an epsilon: 0 times infinity is NaN."""
    w = {"kernel": jnp.ones((1, 2)), "var": jnp.asarray([0.0, 1.0])}

    def net(w: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu((x @ w["kernel"]) * lax.rsqrt(w["var"]).reshape(1, 2))

    x = jnp.arange(-1.0, 3.0).reshape(4, 1)
    network = jax_bnar.fold_batch_norms(net, w, x)
    np.testing.assert_array_equal(network.apply(network.variables, x), net(w, x))
    (refused,) = network.report.refused
    assert "the factor or the folded weight would be infinite or NaN" in refused.reason


def test_traced_float16_weights_are_left() -> None:
    """Nobody knows whether they hold a factor, such as this one of 1e6."""
    w = {"kernel": jnp.ones((4, 6), jnp.float16), "var": jnp.full(6, 1e-12, jnp.float32)}
    reports = []

    def net(w: Any, x: jax.Array) -> jax.Array:
        return (x @ w["kernel"]).astype(jnp.float32) * lax.rsqrt(w["var"].reshape(1, 6))

    @jax.jit
    def folded(w: Any, x: jax.Array) -> jax.Array:
        network = jax_bnar.fold_batch_norms(net, w, x)
        reports.append(network.report)
        return network.apply(network.variables, x)

    x = X.astype(jnp.float16) / 64
    np.testing.assert_allclose(folded(w, x), net(w, x), rtol=1e-3)
    (refused,) = reports[0].refused
    assert "not known while it is traced" in refused.reason
