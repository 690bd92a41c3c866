"""flax.linen.BatchNorm + add + nn.relu under XLA.

The layer has its defaults except for the dtypes: the result has that of x and the parameters are
float32, as in the Flax ResNet example. Forward and backward are in one jit, which lets XLA fuse
across them. In a network it could not, because the rest of the network lies between them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.common.sites import Site
from benchmarks.sites.peers import Step, _jax
from benchmarks.sites.problem import (
    EPSILON,
    MOMENTUM,
    RUNNING_MEAN,
    RUNNING_VAR,
    DType,
    Problem,
    Results,
)


def forward(site: Site, dtype: DType, axis: int = -1) -> Callable[..., tuple[jax.Array, Any]]:
    """A function from (x, z, params, batch_stats) to y and, as auxiliary, the new batch_stats."""
    layer = nn.BatchNorm(
        use_running_average=False,
        axis=axis,
        momentum=MOMENTUM,
        epsilon=EPSILON,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.float32,
    )

    def apply(x: Any, z: Any, params: Any, batch_stats: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        y, updates = layer.apply(variables, x, mutable=["batch_stats"])
        if z is not None:
            y = y + z
        if site.form != "batch_norm":
            y = nn.relu(y)
        return y, updates["batch_stats"]

    return apply


def operator(site: Site, dtype: DType) -> Callable[..., tuple[jax.Array, Any]]:
    """A function from (x, z, scale, bias) to y and, as auxiliary, the new batch_stats."""

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        stats = {"mean": jnp.zeros_like(scale), "var": jnp.ones_like(scale)}
        return forward(site, dtype)(x, z, {"scale": scale, "bias": bias}, stats)

    return apply


def build(problem: Problem) -> Step:
    channels = problem.site.channels
    layer = forward(problem.site, problem.dtype, problem.axis)

    def step(x: Any, z: Any, params: Any, batch_stats: Any, dy: Any):
        apply = functools.partial(layer, batch_stats=batch_stats)
        y, vjp, new_stats = jax.vjp(apply, x, z, params, has_aux=True)
        return y, new_stats, *vjp(dy)

    def to_results(outputs: Any) -> Results:
        y, stats, dx, dz, dparams = _jax.to_numpy(outputs, problem)
        return Results(y, stats["mean"], stats["var"], dx, dz, dparams["scale"], dparams["bias"])

    operands = (
        _jax.activation(problem.x, problem),
        _jax.activation(problem.z, problem),
        {"scale": _jax.parameter(problem.scale), "bias": _jax.parameter(problem.bias)},
        {
            "mean": jnp.full(channels, RUNNING_MEAN, jnp.float32),
            "var": jnp.full(channels, RUNNING_VAR, jnp.float32),
        },
        _jax.activation(problem.dy, problem),
    )
    return _jax.make_step(step, layer, operands, to_results)
