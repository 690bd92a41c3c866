"""The warning that save="mask" makes XLA gather an activation."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sharding_tools import make_mesh, put, relative_difference

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._sharding import gathers

pytestmark = pytest.mark.quick


def test_the_gather_of_a_mask_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathers, "_warned", False)
    x = put(jnp.ones((8, 4, 4, 12), jnp.float32), make_mesh("auto", d=4), P(None, None, None, "d"))

    def compiled(**options: Any) -> Any:
        operator = functools.partial(jax_bnar.bn_add_relu, scale=None, bias=None, **options)
        gradient = jax.grad(lambda x: operator(x, x).y.sum())
        return jax.jit(gradient).lower(x).compile()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(save="y")
        assert caught == []
        compiled(save="mask")
        compiled(save="mask", epsilon=0.1)
    (warning,) = caught
    sentence = str(warning.message)
    assert "gather x of shape (8, 4, 4, 12), sharded by P(None, None, None, 'd')" in sentence
    assert "a device's shard, (8, 4, 4, 3), does not hold whole bytes" in sentence
    assert 'Way out: save="y"' in sentence


def test_the_types_of_statistics_do_not_depend_on_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without derivatives asks for no mask, and its derivative rule for one."""
    monkeypatch.setattr(gathers, "_warned", True)  # The previous test is about the warning.
    x = jnp.sin(jnp.arange(16 * 3 * 8, dtype=jnp.float32)).reshape(16, 3, 8)

    def gradient(x: jax.Array, save: Save) -> jax.Array:
        norm = jax.jit(lambda x: jax_bnar.bn_relu(x, None, None, save=save))

        def loss(x: jax.Array) -> jax.Array:
            y, mean, var = norm(x)
            return (y * y).sum() + mean.sum() + jnp.sin(var).sum()

        return jax.grad(loss)(x)

    want = gradient(x, "y")
    mesh = make_mesh("explicit", d=8)
    with jax.set_mesh(mesh):
        sharded = put(x, mesh, P(None, None, "d"))
        got = gradient(sharded, "mask")
        assert jax.typeof(got) == jax.typeof(sharded)
    assert relative_difference(got, want) < 2e-6
