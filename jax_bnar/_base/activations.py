"""The activations that the operators fuse: y = act(u), with u the value before it.

They are those of `jax.nn` in value and in derivative, also where the derivative jumps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp

from jax_bnar._base.jax_compat import is_copy_of

Activation = Literal[
    "none",
    "relu",
    "relu6",
    "leaky_relu",
    "silu",
    "hard_silu",
    "elu",
    "gelu",
    "exact_gelu",
    "mish",
]
_ALIASES: Final[dict[str, Activation]] = {"swish": "silu", "hard_swish": "hard_silu"}
# The default of jax.nn.leaky_relu.
_NEGATIVE_SLOPE: Final = 0.01


class FusedActivation(NamedTuple):
    """An activation as the operators take it; the slope is that of a leaky ReLU, 0 for others."""

    name: Activation
    negative_slope: float = 0.0


@dataclasses.dataclass(frozen=True)
class Curve:
    """An activation other than ReLU. Functions take u and the slope of a leaky ReLU.

    Attributes:
        value: act(u).
        derivative: act'(u).
        is_open: for a piecewise linear activation, where the derivative is 1; None for others. It
            is the same for u and for y, so backward can read y, or one bit for each element. The
            others are computed from x, and from the residual if there is one.
        selects: whether a derivative of 0 stops infinite and NaN cotangents, as in `jax.nn`.
    """

    value: Callable[[jax.Array, float], jax.Array]
    derivative: Callable[[jax.Array, float], jax.Array]
    is_open: Callable[[jax.Array], jax.Array] | None = None
    selects: bool = False


NO_ACTIVATION: Final = FusedActivation("none")
RELU: Final = FusedActivation("relu")


def _relu6_is_open(u: jax.Array) -> jax.Array:
    return (u > 0) & (u < 6)


def _relu6_derivative(u: jax.Array, _: float = 0) -> jax.Array:
    return _relu6_is_open(u).astype(u.dtype)


# A negative u may have a y that is 0, because the slope is 0 or y is rounded. That 0 is negative
# then, and that of a u which is 0 is made positive.
def _leaky_relu_is_open(u: jax.Array) -> jax.Array:
    return (u >= 0) & ~jnp.signbit(u)


def _leaky_relu(u: jax.Array, negative_slope: float) -> jax.Array:
    return jnp.where(u >= 0, jnp.abs(u), _like(negative_slope, u) * u)


def _leaky_relu_derivative(u: jax.Array, negative_slope: float) -> jax.Array:
    one, slope = jnp.ones_like(u), jnp.full_like(u, negative_slope)
    return jnp.where(_leaky_relu_is_open(u), one, slope)


def _silu_derivative(u: jax.Array, _: float) -> jax.Array:
    sigmoid = jax.nn.sigmoid(u)
    return sigmoid * (u * (1 - sigmoid) + 1)


def _hard_silu_derivative(u: jax.Array, _: float) -> jax.Array:
    six = _like(6, u)
    shifted = u + _like(3, u)
    of_gate = jnp.where(_relu6_is_open(shifted), u / six, jnp.zeros_like(u))
    return jax.nn.relu6(shifted) / six + of_gate


def _elu_derivative(u: jax.Array, _: float) -> jax.Array:
    return jnp.where(u > 0, jnp.ones_like(u), jnp.exp(jnp.where(u > 0, 0, u)))


# GELU, in the approximation by tanh, is u * sigmoid(w) with w = u * (first + third * u^2). Written
# with a tanh, it has no correct digits where u is below -5.
_GELU_FIRST: Final = 2 * math.sqrt(2 / math.pi)
_GELU_THIRD: Final = 0.044715 * _GELU_FIRST


def _gelu(u: jax.Array, _: float) -> jax.Array:
    return u * jax.nn.sigmoid(u * (_like(_GELU_FIRST, u) + _like(_GELU_THIRD, u) * u * u))


def _gelu_derivative(u: jax.Array, _: float) -> jax.Array:
    first, third = _like(_GELU_FIRST, u), _like(_GELU_THIRD, u)
    w = u * (first + third * u * u)
    # Where it is limited, the product of the sigmoids is 0.
    slope = jnp.clip(u * (first + 3 * third * u * u), -1e4, 1e4)
    return jax.nn.sigmoid(w) * (1 + slope * jax.nn.sigmoid(-w))


# The exact GELU is u * Phi(u), with the distribution function of the normal distribution.
def _exact_gelu(u: jax.Array, _: float) -> jax.Array:
    return u * _normal_cdf(u)


def _exact_gelu_derivative(u: jax.Array, _: float) -> jax.Array:
    # Where it is limited, the density is 0, and the product would not be where u is infinite.
    limited = jnp.clip(u, -100, 100)
    density = _like(1 / math.sqrt(2 * math.pi), u) * jnp.exp(limited * limited * _like(-0.5, u))
    return _normal_cdf(u) + limited * density


def _normal_cdf(u: jax.Array) -> jax.Array:
    return _like(0.5, u) * jax.lax.erfc(_like(-math.sqrt(0.5), u) * u)


# Mish is u * tanh(log(1 + e^u)). With m = e^-|u|, the tanh is a fraction that loses no digits. (The
# derivative of jnp.abs at 0 would be that of neither branch.)
def _mish_terms(u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    m = jnp.exp(jnp.where(u > 0, -u, u))
    m_or_one = jnp.where(u > 0, m, jnp.ones_like(u))
    numerator = jnp.where(u > 0, 1 + 2 * m, m * (m + 2))
    return m, m_or_one, numerator, numerator + 2 * m_or_one * m_or_one


def _mish(u: jax.Array, _: float) -> jax.Array:
    numerator, denominator = _mish_terms(u)[2:]
    return u * (numerator / denominator)


def _mish_derivative(u: jax.Array, _: float) -> jax.Array:
    m, m_or_one, numerator, denominator = _mish_terms(u)
    of_tanh = 4 * m * (1 + m) * m_or_one / (denominator * denominator)
    return numerator / denominator + u * of_tanh


def _like(number: float, u: jax.Array) -> jax.Array:
    return jnp.asarray(number, u.dtype)


CURVES: Final[dict[str, Curve]] = {
    "relu6": Curve(lambda u, _: jax.nn.relu6(u), _relu6_derivative, _relu6_is_open, selects=True),
    "leaky_relu": Curve(_leaky_relu, _leaky_relu_derivative, _leaky_relu_is_open),
    "silu": Curve(lambda u, _: jax.nn.silu(u), _silu_derivative),
    "hard_silu": Curve(lambda u, _: jax.nn.hard_silu(u), _hard_silu_derivative),
    "elu": Curve(lambda u, _: jax.nn.elu(u), _elu_derivative),
    "gelu": Curve(_gelu, _gelu_derivative),
    "exact_gelu": Curve(_exact_gelu, _exact_gelu_derivative),
    "mish": Curve(_mish, _mish_derivative),
}


def fused_activation(given: Any) -> FusedActivation | None:
    """The activation that a name or a function of `jax.nn` stands for; None if there is no such.

    `jax.nn.identity` is "none".

    A leaky ReLU with another slope is `functools.partial(jax.nn.leaky_relu, negative_slope=0.1)`.
    "gelu" is the approximation by tanh, which is the default of `jax.nn.gelu`, and "exact_gelu" is
    `functools.partial(jax.nn.gelu, approximate=False)`. ELU has the alpha 1, as in `jax.nn.elu`.
    """
    if isinstance(given, FusedActivation):
        return given
    if isinstance(given, str):
        name = cast(Activation, _ALIASES.get(given, given))
        if name not in get_args(Activation):
            return None
        return FusedActivation(name, _NEGATIVE_SLOPE if name == "leaky_relu" else 0.0)
    if _is(given, jax.nn.identity):
        return NO_ACTIVATION
    if isinstance(given, functools.partial):
        return _of_partial(given)
    for name in get_args(Activation):
        # Linen's and NNX's functions of these names are the same objects.
        if callable(given) and _is(given, getattr(jax.nn, name, None)):
            return fused_activation(name)
    return None


def _is(given: Any, function: Any) -> bool:
    """Whether it is this function of `jax.nn`, perhaps in a copy of the layer that holds it."""
    return given is function or is_copy_of(given, function)


def _of_partial(given: functools.partial[Any]) -> FusedActivation | None:
    if _is(given.func, jax.nn.leaky_relu):
        return _leaky(*given.args, **given.keywords)
    for function, name, arguments in (
        (jax.nn.gelu, "gelu", {"approximate": True}),
        (jax.nn.gelu, "exact_gelu", {"approximate": False}),
        (jax.nn.elu, "elu", {"alpha": 1}),
    ):
        if _is(given.func, function) and not given.args and _is_within(given.keywords, arguments):
            return fused_activation(name)
    return None


def _is_within(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether all that is given is among these arguments."""
    numbers = all(isinstance(value, (bool, int, float)) for value in given.values())
    return numbers and given.items() <= arguments.items()


def takes_slope(negative_slope: float) -> bool:
    """Whether the sign of y is that of u."""
    return 0 <= negative_slope < 1


def _leaky(*args: Any, negative_slope: Any = _NEGATIVE_SLOPE, **others: Any) -> Any:
    """The leaky ReLU of this slope, if it is one for which the sign of y is that of u."""
    is_number = isinstance(negative_slope, Real) and not isinstance(negative_slope, bool)
    if args or others or not is_number or not takes_slope(float(negative_slope)):
        return None
    # The sign of -0.0 would make a y that is 0 positive.
    return FusedActivation("leaky_relu", float(negative_slope) + 0.0)


def may_widen(activation: Activation) -> bool:
    """Whether operators give a y of another dtype than that of x (`out_dtype`)."""
    return activation in ("none", "relu")


def names() -> str:
    """The names for error messages."""
    return ", ".join(repr(name) for name in get_args(Activation))


def activate(u: jax.Array, activation: Activation, negative_slope: float = 0.0) -> jax.Array:
    """act(u), in the dtype of u."""
    if activation == "none":
        return u
    if activation == "relu":
        return jax.nn.relu(u)
    return CURVES[activation].value(u, negative_slope)


def is_open(y: jax.Array, activation: Activation) -> jax.Array:
    """Where the derivative of a piecewise linear activation is 1, by y or by u."""
    if activation == "relu":
        return y > 0
    of_curve = CURVES[activation].is_open
    assert of_curve is not None, activation
    return of_curve(y)


def follows_from_y(activation: Activation) -> bool:
    """Whether backward finds the derivative in y or in a mask."""
    return activation == "relu" or (activation in CURVES and CURVES[activation].is_open is not None)


def statics_of(activation: Activation, negative_slope: float) -> dict[str, Any]:
    """The static parameters of primitives that name an activation."""
    return {"activation": activation, "negative_slope": negative_slope}
