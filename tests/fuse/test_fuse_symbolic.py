"""`fuse` of programs for many shapes: `jax.export` with symbolic sizes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import operators
from jax import export, lax

import jax_bnar

F32 = jnp.float32


class _Network(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not self.train)(x)
        return nn.relu(y + x).mean((1, 2))


def _training(variables: Any, x: Any, fuse: Any = jax_bnar.fuse) -> Any:
    def loss(params: Any, x: Any) -> Any:
        collections = {**variables, "params": params}
        y, updates = _Network(True).apply(collections, x, mutable=["batch_stats"])
        return (y**2).mean(), updates

    return jax.value_and_grad(fuse(loss), has_aux=True)(variables["params"], x)


def _evaluation(variables: Any, x: Any, fuse: Any = jax_bnar.fuse) -> Any:
    return fuse(_Network(False).apply)(variables, x)


@pytest.mark.quick
@pytest.mark.parametrize("step", [_training, _evaluation])
def test_a_symbolic_batch(step: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (6, 8, 8, 3), F32)
    variables = _Network(True).init(jax.random.key(1), x)
    (batch,) = export.symbolic_shape("batch")
    given = jax.ShapeDtypeStruct((batch, 8, 8, 3), F32)
    exported = export.export(jax.jit(step), disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS)(
        variables, given
    )
    assert "jax_bnar" in exported.mlir_module()
    expected = step(variables, x, fuse=lambda f: f)
    for a, b in zip(*map(jax.tree.leaves, (exported.call(variables, x), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _by_var(x: Any) -> tuple[Any, Any]:
    return x.mean((0, 1, 2)), x.var((0, 1, 2))


def _by_sums(x: Any) -> tuple[Any, Any]:
    count = x.shape[0] * x.shape[1] * x.shape[2]
    mean = x.sum((0, 1, 2)) / count
    return mean, jnp.square(x).sum((0, 1, 2)) / count - mean * mean


def _axis_by_axis(x: Any) -> tuple[Any, Any]:
    mean = x.mean(0).mean(0).mean(0)
    return mean, jnp.square(x - mean.reshape(1, 1, 1, -1)).mean(0).mean((0, 1))


def _with_ddof(x: Any) -> tuple[Any, Any]:
    return x.mean((0, 1, 2)), x.var((0, 1, 2), ddof=1)


def _wrong_count(x: Any) -> tuple[Any, Any]:
    mean, var = _by_var(x)
    return mean * x.shape[0] / (x.shape[0] + 1), var


SHAPES = ["b, 4, 4, 3", "2*b, h, h, 16", "b + 1, h, 2*h, 16", "b, 4, 4, c", "1, b, 4, 8"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("moments", [_by_var, _by_sums, _axis_by_axis])
def test_forms(shape: str, moments: Any) -> None:
    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), F32)
    assert operators(_layer(moments), x, x) == {"bn_add_relu": 1}
    fused = jax.jit(jax_bnar.fuse(_layer(moments)))
    assert (
        export.export(fused, disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS)(x, x)
        .in_avals[0]
        .shape
        == x.shape
    )


@pytest.mark.parametrize(
    ("moments", "statistics"), [(_with_ddof, {}), (_wrong_count, {"batch_statistics": 1})]
)
def test_refused(moments: Any, statistics: dict[str, int]) -> None:
    """A variance with ddof is a multiple of the variance, but by a factor that is not known."""
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, 4, 3"), F32)
    assert operators(_layer(moments), x, x) == statistics


def _layer(moments: Any) -> Any:
    def layer(x: Any, z: Any) -> Any:
        mean, var = (v.reshape(1, 1, 1, -1) for v in moments(x))
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) + z)

    return layer
