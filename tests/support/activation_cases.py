"""`bn_act` and `dual_bn_act` against NumPy in float64, for the tests on CPUs and on GPUs."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import scipy.special
from cases import Case, Operands, in_order, operands

from jax_bnar import bn_act, dual_bn_act
from jax_bnar._base.implementation import Implementation
from jax_bnar._kernels import targets

SLOPE = 0.2
ACTIVATIONS: dict[str, Any] = {
    "relu6": jax.nn.relu6,
    "leaky_relu": functools.partial(jax.nn.leaky_relu, negative_slope=SLOPE),
    "silu": jax.nn.silu,
    "hard_silu": jax.nn.hard_silu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "mish": jax.nn.mish,
}
# Those whose derivative follows from y.
PIECEWISE = ("relu6", "leaky_relu")
# What does not depend on the curve is the same for all with a derivative from y, or from x.
REPRESENTATIVES = ("relu6", "silu")
JUMPS: dict[str, tuple[float, ...]] = {
    "relu6": (0, 6),
    "leaky_relu": (0,),
    "hard_silu": (-3, 3),
}

# The most by which dx may differ from e in size: |scale|/std, as `operands` draws them.
LARGEST_FACTOR = 2 * 2.0**4
# There, e is kept between the two passes of backward in the dtype of x.
ON_CUDA = jax.default_backend() == "gpu" or targets.cpu_isa() == "emulation of CUDA"

Array = oracle.Array


def value_and_derivative(name: str, u: Array) -> tuple[Array, Array]:
    """act(u) and act'(u), independently of `jax.nn`."""
    if name == "identity":
        return u, np.ones_like(u)
    if name == "relu6":
        return np.clip(u, 0, 6), ((u > 0) & (u < 6)).astype(u.dtype)
    if name == "leaky_relu":
        return np.where(u >= 0, u, SLOPE * u), np.where(u >= 0, 1.0, SLOPE)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-u))
    if name == "silu":
        return u * sigmoid, sigmoid * (1 + u * (1 - sigmoid))
    if name == "elu":
        below = np.minimum(u, 0)
        return np.where(u > 0, u, np.expm1(below)), np.exp(below)
    if name == "gelu":
        root = math.sqrt(2 / math.pi)
        tanh = np.tanh(root * (u + 0.044715 * u**3))
        slope = root * (1 + 3 * 0.044715 * u**2)
        return u * (1 + tanh) / 2, (1 + tanh) / 2 + u * (1 - tanh**2) / 2 * slope
    if name == "exact_gelu":
        below = scipy.special.erfc(-u / math.sqrt(2)) / 2
        return u * below, below + u * np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    if name == "mish":
        tanh = np.tanh(np.logaddexp(u, 0))
        return u * tanh, tanh + u * (1 - tanh**2) * sigmoid
    factor = np.clip((u + 3) / 6, 0, 1)
    return u * factor, factor + np.where((u > -3) & (u < 3), u / 6, 0)


class Problem(NamedTuple):
    """Operands and a cotangent, and what NumPy makes of them in float64.

    `multiplier` is the largest |scale|/std of a channel, where a channel with a single value has
    almost no std, and `u_allowance` what rounding may do to u, which is much where values are near
    to each other.
    """

    operands: Operands
    dy: Array
    y: Array
    e: Array
    multiplier: float
    u_allowance: Array
    gradients: oracle.Backward


def problem(case: Case, name: str) -> Problem:
    given_operands = operands(case)
    layout = {"epsilon": case.epsilon, "axis": case.axis, "num_groups": case.num_groups}
    # In the wide dtype, so that the oracle's allowance is that of u before it is stored.
    wide = jax.tree.map(lambda a: a.astype(case.statistics_dtype), given_operands)
    before = oracle.forward(*wide, **layout, relu=False)
    u = before.y.astype(np.float64)
    y, derivative = value_and_derivative(name, u)
    # Where the derivative jumps, rounding decides which one it is. Nothing depends on it there.
    step = float(jnp.finfo(case.dtype).eps) if name in PIECEWISE else 0
    margin = before.y_allowance + step * (1 + np.abs(u))
    near = np.zeros(u.shape, bool)
    for at in JUMPS.get(name, ()):
        near |= np.abs(u - at) <= margin
    dy = np.random.default_rng(case.seed + 1).standard_normal(case.shape)
    dy = np.where(near, 0, dy).astype(jnp.dtype(case.dtype))
    e = dy.astype(np.float64) * derivative
    x = jax.tree.map(lambda own: own.astype(np.float64), wide.x)
    gradients = oracle.backward(e, x, None, wide.scale, None, None, **layout)
    multiplier = max(
        (1.0 if scale is None else float(np.abs(scale).max()))
        / math.sqrt(float(np.min(var)) + case.epsilon)
        for _, scale, var in oracle.each_input(wide.x, wide.scale, before.var)
    )
    return Problem(given_operands, dy, y, e, multiplier, before.y_allowance, gradients)


def assert_near(
    name: str, actual: Any, exact: Array, dtype: Any, *, terms: float = 1, more: Any = 0
) -> None:
    """Allows one rounding to `dtype`, and rounding errors of the largest of the numbers.

    `terms` is how many numbers of that size are added.
    """
    unit = oracle.unit_roundoff(oracle.accumulation_dtype(dtype))
    size = float(np.abs(exact).max()) + 1
    bound = 2 * oracle.rounding(exact, dtype) + 200 * unit * size * terms + more
    oracle.assert_within(name, np.asarray(actual, np.float64), exact, bound)


def check(case: Case, name: str, implementation: Implementation) -> None:
    """y and all gradients of a case with this activation, with and without a residual."""
    given_operands, dy, y, e, multiplier, u_allowance, exact = problem(case, name)
    options: dict[str, Any] = {"implementation": implementation, **case.keywords}
    act = ACTIVATIONS.get(name, jax.nn.identity)

    @jax.jit
    def both(given_operands: Operands, dy: Any) -> Any:
        def function(given: Operands) -> Any:
            if case.inputs == 2:
                return dual_bn_act(*in_order(given), activation=act, **options).y
            x, z, scale, bias = given
            return bn_act(x, scale, bias, act, z=z, **options).y

        y, vjp = jax.vjp(function, given_operands)
        return y, *vjp(dy)

    actual, gradients = both(given_operands, dy)
    assert actual.dtype == jnp.dtype(case.dtype)
    assert_near("y", actual, y, case.dtype, more=1.2 * u_allowance)  # No derivative is above 1.2.
    rounded_e = 0.0
    if given_operands.z is not None:
        assert_near("dz", gradients.z, e, case.dtype)
    keeps_e = implementation == "ffi" and (ON_CUDA or case.inputs > 1) and name != "identity"
    if given_operands.z is not None or keeps_e:
        # What backward stores, for the residual or where dx will be, is what it reads for dx. The
        # means of e and of e * (x - mean) / std are off by as much, and reach each element.
        largest = float(np.abs(e).max())
        factor = min(4 * multiplier, max(8 * LARGEST_FACTOR, multiplier))
        rounded_e = oracle.unit_roundoff(case.dtype) * factor * largest
    scaled = LARGEST_FACTOR * max(case.ratio, 1)
    for dx, value in oracle.each_input(gradients.x, exact.dx):
        assert_near("dx", dx, value, case.dtype, terms=scaled, more=rounded_e)
    terms = e.size * max(case.ratio, 1)
    for parameter in ("scale", "bias"):
        gradient_name = f"d{parameter}"
        for gradient, value in oracle.each_input(
            getattr(gradients, parameter), getattr(exact, gradient_name)
        ):
            if gradient is not None:
                stored = oracle.rounding(value, gradient.dtype).max()
                wide = case.statistics_dtype
                assert_near(gradient_name, gradient, value, wide, terms=terms, more=2 * stored)
