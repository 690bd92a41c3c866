"""Programs with the statistics of a BatchNorm that no operator computes as a whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from fuse_tools import array
from jax import lax

AXES = (0, 1, 2)
X, G = array((16, 8, 8, 8)), array((16, 8, 8, 8), 1)
SCALE = array((1, 1, 1, 8), 2)
SIZE = X.size * 4


def moments(x: Any, axes: Any = AXES) -> tuple[jax.Array, jax.Array]:
    return x.mean(axes, keepdims=True), x.var(axes, keepdims=True)


def fast_moments(x: Any) -> tuple[jax.Array, jax.Array]:
    mean = x.mean(AXES, keepdims=True)
    squares = jnp.square(x).mean(AXES, keepdims=True)
    return mean, jnp.maximum(0, squares - mean * mean)


def gated(x: Any, g: Any, mean: Any, var: Any) -> jax.Array:
    return jax.nn.relu((x - mean) * (lax.rsqrt(var + 1e-3) * jax.nn.sigmoid(g)))


def gate(x: Any, g: Any, scale: Any) -> Any:
    return gated(x, g, *moments(x))


def gate_by_fast_statistics(x: Any, g: Any, scale: Any) -> Any:
    return gated(x, g, *fast_moments(x))


def gate_in_slope_and_offset(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    slope = scale * lax.rsqrt(var + 1e-3) * jax.nn.sigmoid(g)
    return x * slope - mean * slope


def scale_chosen_for_each_element(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    return (x - mean) * (jnp.where(g > 0, scale, 2 * scale) * lax.rsqrt(var + 1e-3))


def stopped(x: Any, g: Any, scale: Any) -> Any:
    mean, var = map(lax.stop_gradient, moments(x))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * scale + g)


def stopped_mean(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    return jax.nn.relu((x - lax.stop_gradient(mean)) * lax.rsqrt(var + 1e-3) * scale + g)


def stopped_variance(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    return jax.nn.relu((x - mean) * lax.rsqrt(lax.stop_gradient(var) + 1e-3) * scale + g)


def statistics_of_a_stopped_array(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(lax.stop_gradient(x))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * scale + g)


def epsilon_of_the_program(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    return (x - mean) * lax.rsqrt(var + jnp.square(scale) + 1e-3)


def epsilon_outside_the_root(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    return jax.nn.relu((x - mean) / (jnp.sqrt(var) + 1e-3))


def centred_array_returned(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    centred = x - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)), centred


def chosen_at_run_time(x: Any, g: Any, scale: Any) -> Any:
    mean, var = moments(x)
    mean = jnp.where(scale[..., 0] > 0, mean, scale)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3))


def of_a_sum_with_a_vector(x: Any, g: Any, scale: Any) -> Any:
    """A bias as of a convolution, which stays out of what the kernel reads."""
    x = x + scale
    mean, var = moments(x)
    return gated(x, g, mean, var), mean.reshape(-1)


def of_channels_first(x: Any, g: Any, scale: Any) -> Any:
    return gated(x, g, *moments(x, (0, 2, 3)))


def of_ghost_batches(x: Any, g: Any, scale: Any) -> Any:
    x, g = (a.reshape(4, 4, 8, 8, 8) for a in (x, g))
    return gated(x, g, *moments(x, (1, 2, 3)))


def unbiased(x: Any, g: Any, scale: Any) -> Any:
    mean = x.mean(AXES, keepdims=True)
    return gated(x, g, mean, x.var(AXES, keepdims=True, ddof=1))


def returned(x: Any, g: Any, scale: Any) -> Any:
    return tuple(a.reshape(-1) for a in moments(x))


def returned_with_the_mean_of_squares(x: Any, g: Any, scale: Any) -> Any:
    mean, squares = x.mean(AXES), jnp.square(x).mean(AXES)
    return mean, squares, squares - mean * mean


def deviation(x: Any, g: Any, scale: Any) -> Any:
    return x.std(AXES)


def penalty(x: Any, g: Any, scale: Any) -> Any:
    mean, var = fast_moments(x)
    return jnp.sum(jnp.square(mean)) + jnp.sum(jnp.square(var - 1))


# Each with a part of the reason why no operator computes more; empty if nothing is normalised.
PROGRAMS: dict[Callable[..., Any], str] = {
    gate: "such as a gate",
    gate_by_fast_statistics: "such as a gate",
    gate_in_slope_and_offset: "such as a gate",
    scale_chosen_for_each_element: "a choice at run time",
    stopped: "stop_gradient",
    stopped_mean: "mean that is subtracted",
    stopped_variance: "stop_gradient",
    statistics_of_a_stopped_array: "stop_gradient",
    epsilon_of_the_program: "epsilon is not a constant",
    epsilon_outside_the_root: "a number is added to the standard deviation",
    centred_array_returned: "used elsewhere",
    chosen_at_run_time: "mean that is subtracted",
    of_a_sum_with_a_vector: "such as a gate",
    of_channels_first: "such as a gate",
    of_ghost_batches: "such as a gate",
    unbiased: "such as a gate",
    returned: "",
    returned_with_the_mean_of_squares: "",
    deviation: "",
    penalty: "",
}
NAMED = {"argvalues": PROGRAMS, "ids": lambda f: f.__name__}
