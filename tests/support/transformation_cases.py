"""Small random calls of the operators in float64, each with its formula in plain `jax.numpy`.

These are for tests of transformations. Both are functions of the same arrays, so a transformation
must give the same for both. With random numbers no pre-activation is 0, where rounding could open
different gates of the ReLU.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jax_bnar

Arrays = tuple[Any, ...]
# A function of arrays that returns (y, mean, var), or (y,) with given statistics.
Function = Callable[..., Arrays]

# Shape, channel axis, and groups that divide the first axis. There are few because each one has to
# be compiled.
LAYOUTS = [
    ((4, 3, 2), 1, 2),
    ((2, 2, 3), -1, 1),
    ((5, 2), 1, 1),
    ((2, 4), 0, 1),
    ((2, 1, 2, 3, 1), 3, 2),
    ((1, 3), 1, 1),
]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, except for the values, which follow from `seed`."""

    form: str
    given_statistics: bool
    shape: tuple[int, ...]
    axis: int
    num_groups: int
    save: str
    has_scale: bool
    has_bias: bool
    epsilon: float
    implementation: str
    seed: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays that the functions take."""
        present = {
            "x": True,
            "z": self.form == "bn_add_relu",
            "scale": self.has_scale,
            "bias": self.has_bias,
            "mean": self.given_statistics,
            "var": self.given_statistics,
        }
        return tuple(name for name, there in present.items() if there)

    @property
    def arguments(self) -> tuple[int, ...]:
        return tuple(range(len(self.names)))


@st.composite
def calls(draw: st.DrawFn, first: int = 0, *, training_only: bool = False) -> Call:
    """Calls of any form, layout and flags.

    Args:
        draw: passed by Hypothesis.
        first: rotates the values of each flag. Hypothesis always tries the first ones; tests that
            have time for one example get different ones this way.
        training_only: leaves out the inference forms.
    """

    def one_of(*options: Any) -> Any:
        start = first % len(options)
        return draw(st.sampled_from(options[start:] + options[:start]))

    given_statistics = one_of(False, False, True) and not training_only
    shape, axis, num_groups = one_of(*LAYOUTS)
    return Call(
        form=one_of("bn_add_relu", "bn_relu", "bn_add_relu", "batch_norm", "bn_add_relu"),
        given_statistics=given_statistics,
        shape=shape,
        axis=axis,
        num_groups=1 if given_statistics else num_groups,
        save=one_of("mask", "y"),
        has_scale=one_of(True, True, True, False),
        has_bias=one_of(True, True, True, True, False),
        epsilon=one_of(1e-5, 1e-2),
        implementation=one_of("ffi", "xla", "xla", "ffi"),
        seed=draw(st.integers(0, 2**31)),
    )


def arrays(call: Call, more_seed: int = 0) -> Arrays:
    """Operands; other seeds give directions for derivatives."""
    random = np.random.default_rng([call.seed, more_seed])
    results = []
    for name in call.names:
        shape = call.shape if name in "xz" else (call.shape[call.axis],)
        value = random.standard_normal(shape)
        results.append(np.square(value) + 0.5 if name == "var" else value + 0.25)
    return tuple(results)


class Values(NamedTuple):
    """Operands of a call, and two directions for derivatives."""

    given: Arrays
    one: Arrays
    two: Arrays


def values(call: Call) -> Values:
    return Values(*(arrays(call, seed) for seed in range(3)))


def operands(call: Call, given: Arrays) -> dict[str, Any]:
    """The operands by name; scale and bias are None if the call leaves them out."""
    return {"scale": None, "bias": None, **dict(zip(call.names, given, strict=True))}


def ours(call: Call, **keywords: Any) -> Function:
    """The operator as a function of arrays."""
    name = f"{call.form}_inference" if call.given_statistics else call.form
    options = {"epsilon": call.epsilon, "axis": call.axis, "implementation": call.implementation}
    if not call.given_statistics:
        options |= {"num_groups": call.num_groups, "save": call.save}

    def function(*given: Any) -> Arrays:
        result = getattr(jax_bnar, name)(**operands(call, given), **options, **keywords)
        return (result,) if call.given_statistics else tuple(result)

    return function


def formula(call: Call, axis_name: str | None = None) -> Function:
    """What the operator computes, written in plain JAX."""

    def averaged(array: jax.Array, reduced: tuple[int, ...]) -> jax.Array:
        mean = array.mean(reduced, keepdims=True)
        return mean if axis_name is None else jax.lax.pmean(mean, axis_name)

    def function(*given: Any) -> Arrays:
        named: dict[str, Any] = operands(call, tuple(map(jnp.asarray, given)))
        x, z = named["x"], named.get("z")
        groups = call.num_groups
        grouped = x.reshape(groups, x.shape[0] // groups, *x.shape[1:])
        channel = call.axis % x.ndim + 1
        reduced = tuple(a for a in range(1, grouped.ndim) if a != channel)
        along = [1] * grouped.ndim
        along[channel] = grouped.shape[channel]

        def spread(vector: jax.Array) -> jax.Array:
            return jnp.broadcast_to(vector, grouped.shape)

        if call.given_statistics:
            mean, var = (named[name].reshape(along) for name in ("mean", "var"))
            centred = grouped - spread(mean)
        else:
            mean = averaged(grouped, reduced)
            centred = grouped - spread(mean)
            var = averaged(jnp.square(centred), reduced)
        y = centred * spread(jax.lax.rsqrt(var + call.epsilon))
        if named["scale"] is not None:
            y = y * spread(named["scale"].reshape(along))
        if named["bias"] is not None:
            y = y + spread(named["bias"].reshape(along))
        y = y.reshape(x.shape)
        if z is not None:
            y = y + z
        if call.form != "batch_norm":
            y = jax.nn.relu(y)
        if call.given_statistics:
            return (y,)
        shape = (along[channel],) if groups == 1 else (groups, along[channel])
        return y, mean.reshape(shape), var.reshape(shape)

    return function


def weights(like: Any) -> jax.Array:
    """Fixed numbers with the shape of `like`, none of them special."""
    return jnp.cos(jnp.arange(1, like.size + 1, dtype=like.dtype)).reshape(like.shape)


def scalar(function: Function) -> Callable[..., jax.Array]:
    """A loss that is not linear in any result."""

    def loss(*given: Any) -> jax.Array:
        results = function(*given)
        waves = [(jnp.sin(r) * weights(r)).sum() for r in results]
        squares = [(r * r).sum() for r in results[1:]]
        return functools.reduce(operator.add, waves + squares)

    return loss
