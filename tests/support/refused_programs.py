"""Programs that resemble a BatchNorm and that `fuse` refuses, each with a part of the reason."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from fuse_operands import AXES
from jax import lax
from statistics_programs import moments


def normalised(x: Any, axes: Any = AXES, epsilon: Any = 1e-3) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(axes, keepdims=True) + epsilon)


def affine(x: Any, scale: Any, bias: Any) -> jax.Array:
    return x * scale.reshape(1, 1, 1, -1) + bias.reshape(1, 1, 1, -1)


def affine_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    return affine(normalised(x), scale, bias)


def layer_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(affine(normalised(x, (3,)), scale, bias))


def layer_norm_of_rows(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(normalised(x.reshape(6, -1), (1,)))


def layer_norm_of_examples(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(affine(normalised(x, (1, 2, 3)), scale, bias))


def instance_norm_of_few(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(affine(normalised(x, (1, 2)), scale, bias))


def instance_norm_of_few_by_division(x: Any, scale: Any, bias: Any) -> jax.Array:
    """JAX knows no line of the program for a division by an operator."""
    mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    y = x - mean
    y /= jnp.sqrt(var + 1e-3)
    return jax.nn.relu(y)


def instance_norm_of_few_and_residual(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(affine(normalised(x, (1, 2)), scale, bias) + jnp.sin(x))


def group_norm(x: Any, scale: Any, bias: Any) -> jax.Array:
    groups = jnp.concatenate([x, x * 2], -1).reshape(6, 5, 4, 2, 3)
    return jax.nn.relu(normalised(groups, (1, 2, 4)).reshape(6, 5, 4, 6))


def flax_group_norm(x: Any, scale: Any, bias: Any) -> Any:
    x, scale, bias = (jnp.concatenate([a, a * 2], -1) for a in (x, scale, bias))
    return nn.GroupNorm(3).apply({"params": {"scale": scale, "bias": bias}}, x)


def two_channel_axes(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(normalised(x, (0, 1)))


def all_axes(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(normalised(x, (0, 1, 2, 3)))


def ddof(x: Any, scale: Any, bias: Any) -> jax.Array:
    var = x.var(AXES, keepdims=True, ddof=1)
    y = (x - x.mean(AXES, keepdims=True)) * lax.rsqrt(var + 1e-3)
    return jax.nn.relu(affine(y, scale, bias))


def wrong_count(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean = x.sum(AXES, keepdims=True) / 119
    return jax.nn.relu((x - mean) * lax.rsqrt(((x - mean) ** 2).mean(AXES, keepdims=True) + 1e-3))


def other_floor(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(jnp.maximum(var, 1e-2) + 1e-3))


def floor_after_epsilon(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(jnp.maximum(var - 0.5, 0) + 1e-3))


def other_centre(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean = x.mean(AXES, keepdims=True)
    var = jnp.mean((x - x.mean((0, 1, 2, 3))) ** 2, AXES, keepdims=True)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def running_mean_subtracted(x: Any, scale: Any, bias: Any) -> jax.Array:
    y = (x - bias.reshape(1, 1, 1, -1)) * lax.rsqrt(x.var(AXES, keepdims=True) + 1e-3)
    return jax.nn.relu(y)


def no_epsilon(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(var))


def epsilon_of_the_program(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(normalised(x, epsilon=jnp.abs(scale).reshape(1, 1, 1, -1)))


def epsilon_outside_the_root(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = moments(x)
    return jax.nn.relu((x - mean) / (jnp.sqrt(var) + 1e-3))


def stopped_statistics(x: Any, scale: Any, bias: Any) -> jax.Array:
    mean, var = moments(x)
    mean, var = lax.stop_gradient(mean), lax.stop_gradient(var)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def masked(x: Any, scale: Any, bias: Any) -> jax.Array:
    mask = x[..., :1] > 0
    count = mask.sum().astype(x.dtype)
    mean = jnp.where(mask, x, 0).sum(AXES, keepdims=True) / count
    var = jnp.where(mask, x * x, 0).sum(AXES, keepdims=True) / count - mean * mean
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def masked_by_a_product(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The padding of a Conformer, as Lingvo and AlgoPerf write it."""
    mask = (x[..., :1] > 0).astype(x.dtype)
    count = jnp.maximum(jnp.sum(jnp.ones_like(x) * mask, AXES, keepdims=True), 1)
    mean = jnp.sum(x * mask, AXES, keepdims=True) / count
    var = jnp.sum((x - mean) * (x - mean) * mask, AXES, keepdims=True) / count
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def renormalised(x: Any, scale: Any, bias: Any) -> jax.Array:
    """As batch renormalisation corrects the variance by running statistics."""
    mean, var = moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(var * scale.reshape(1, 1, 1, -1) ** 2 + 1e-3))


def chosen_statistics(x: Any, scale: Any, bias: Any) -> jax.Array:
    """Batch or given statistics, chosen by a flag that is only known at run time."""
    mean, var = moments(x)
    flag = scale[0] > 0
    mean = jnp.where(flag, mean, bias.reshape(1, 1, 1, -1))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def centred_array_returned(x: Any, scale: Any, bias: Any) -> Any:
    mean, var = moments(x)
    centred = x - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)), centred


def centred_array_read(x: Any, scale: Any, bias: Any) -> Any:
    mean, var = moments(x)
    centred = x - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)) + jnp.sin(centred)


def narrower_inside(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The program rounds x on purpose."""
    mean, var = moments(x)
    centred = (x - mean).astype(jnp.bfloat16).astype(jnp.float32)
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3))


def wider_inside(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The kernel would compute in float32 what the program computes in float64."""
    return jax.nn.relu(normalised(x.astype(jnp.float64)).astype(jnp.float32))


def by_matrix_product(x: Any, scale: Any, bias: Any) -> jax.Array:
    rows = x.reshape(-1, 3)
    weights = jnp.full(len(rows), 1 / len(rows), x.dtype)
    mean = weights @ rows
    var = weights @ jnp.square(rows) - mean * mean
    return jax.nn.relu((rows - mean[None]) * lax.rsqrt(var + 1e-3)[None])


def by_windows(x: Any, scale: Any, bias: Any) -> jax.Array:
    def mean(a: Any) -> Any:
        return lax.reduce_window(a, 0.0, lax.add, (*a.shape[:3], 1), (1,) * 4, "VALID") / 120

    var = mean(x * x) - mean(x) ** 2
    return jax.nn.relu((x - mean(x)) * lax.rsqrt(var + 1e-3))


def in_a_loop(x: Any, scale: Any, bias: Any) -> jax.Array:
    """The sum over the examples is taken one example after another."""
    start = jnp.zeros((2, 3), x.dtype)
    add = lambda c, a: (c + jnp.stack([a.mean((0, 1)), (a * a).mean((0, 1))]) / 6, None)  # noqa: E731
    (mean, squares), _ = lax.scan(add, start, x)
    var = squares - mean * mean
    return jax.nn.relu((x - mean.reshape(1, 1, 1, 3)) * lax.rsqrt(var + 1e-3).reshape(1, 1, 1, 3))


REFUSED: dict[Callable[..., Any], str] = {
    layer_norm: "LayerNorm",
    layer_norm_of_rows: "LayerNorm",
    layer_norm_of_examples: "LayerNorm",
    instance_norm_of_few: "fewer than 32 elements",
    instance_norm_of_few_by_division: "fewer than 32 elements",
    instance_norm_of_few_and_residual: "fewer than 32 elements",
    group_norm: "GroupNorm",
    flax_group_norm: "GroupNorm",
    two_channel_axes: "several axes",
    all_axes: "no channel axis",
    ddof: "times the population variance of x, as with ddof",
    wrong_count: "population variance",
    other_floor: "clamped at a value",
    floor_after_epsilon: "clamped at a value",
    other_centre: "centre",
    running_mean_subtracted: "mean that is subtracted",
    no_epsilon: "epsilon",
    epsilon_of_the_program: "epsilon is not a constant",
    epsilon_outside_the_root: "a number is added to the standard deviation",
    stopped_statistics: "stop_gradient",
    masked: "mask",
    masked_by_a_product: "a mask or a weight multiplies each element",
    renormalised: "multiplied with an array that is not computed from x, such as running",
    chosen_statistics: "mean that is subtracted",
    centred_array_returned: "used elsewhere",
    centred_array_read: "used elsewhere",
    narrower_inside: "rounds intermediate",
    wider_inside: "rounds intermediate",
    by_matrix_product: "matrix product",
    by_windows: "reduce_window",
    in_a_loop: "in a loop",
}
