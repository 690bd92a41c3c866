"""jax_bnar: the operator under jax.jit and jax.vjp, with the running statistics in plain JAX.

Besides x, one activation is kept for backward: y (save="y"), which suits networks in which the next
layer keeps y anyway. `ours_mask` is the same with save="mask".
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_bnar
from benchmarks.common.sites import Site
from benchmarks.sites.peers import Step, _jax
from benchmarks.sites.problem import EPSILON, MOMENTUM, RUNNING_MEAN, RUNNING_VAR, Problem, Results
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

Operator = Callable[..., tuple[jax.Array, Any]]


def operator(
    site: Site,
    save: Save = "y",
    implementation: Implementation = None,
    out_dtype: Any = None,
    axis: int = -1,
) -> Operator:
    """A function from (x, z, scale, bias) to y and, as auxiliary results, (mean, var)."""
    options: Any = {
        "epsilon": EPSILON,
        "axis": axis,
        "implementation": implementation,
        "out_dtype": out_dtype,
    }

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        if site.form == "bn_add_relu":
            y, mean, var = jax_bnar.bn_add_relu(x, z, scale, bias, save=save, **options)
        elif site.form == "bn_relu":
            y, mean, var = jax_bnar.bn_relu(x, scale, bias, save=save, **options)
        else:
            y, mean, var = jax_bnar.batch_norm(x, scale, bias, **options)
        return y, (mean, var)

    return apply


def silu(implementation: Implementation = None) -> Operator:
    """The same with SiLU, and without z."""

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        del z
        options: Any = {"epsilon": EPSILON, "implementation": implementation}
        y, mean, var = jax_bnar.bn_act(x, scale, bias, "silu", **options)
        return y, (mean, var)

    return apply


def on_widened(apply: Operator) -> Operator:
    """The operator on a float32 copy of x."""
    return lambda x, *others: apply(x.astype(jnp.float32), *others)


def gradient_step(apply: Operator) -> Callable[..., tuple[Any, ...]]:
    """A function from (x, z, scale, bias, dy) to (y, dx, dz, dscale, dbias) of an operator.

    Running statistics are left out.
    """

    def step(x: Any, z: Any, scale: Any, bias: Any, dy: Any) -> tuple[Any, ...]:
        y, vjp, _ = jax.vjp(apply, x, z, scale, bias, has_aux=True)
        return y, *vjp(dy)

    return step


def build(problem: Problem, save: Save = "y") -> Step:
    channels = problem.site.channels
    apply = operator(problem.site, save, axis=problem.axis)

    def running(old: tuple[Any, Any], new: tuple[Any, Any]) -> list[Any]:
        return [MOMENTUM * a + (1 - MOMENTUM) * b for a, b in zip(old, new, strict=True)]

    def step(x: Any, z: Any, scale: Any, bias: Any, old_mean: Any, old_var: Any, dy: Any):
        y, vjp, statistics = jax.vjp(apply, x, z, scale, bias, has_aux=True)
        return y, *running((old_mean, old_var), statistics), *vjp(dy)

    def forward(x: Any, z: Any, scale: Any, bias: Any, old_mean: Any, old_var: Any):
        y, statistics = apply(x, z, scale, bias)
        return y, *running((old_mean, old_var), statistics)

    def to_results(outputs: Any) -> Results:
        y, mean, var, dx, dz, dscale, dbias = _jax.to_numpy(outputs, problem)
        return Results(y, mean, var, dx, dz, dscale, dbias)

    operands = (
        _jax.activation(problem.x, problem),
        _jax.activation(problem.z, problem),
        _jax.parameter(problem.scale),
        _jax.parameter(problem.bias),
        jnp.full(channels, RUNNING_MEAN, jnp.float32),
        jnp.full(channels, RUNNING_VAR, jnp.float32),
        _jax.activation(problem.dy, problem),
    )
    return _jax.make_step(step, forward, operands, to_results)
