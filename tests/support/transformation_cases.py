"""Small random calls of the operators in float64, each with its formula in plain `jax.numpy`.

These are for tests of transformations. Both are functions of the same arrays, so a transformation
must give the same for both. With random numbers no pre-activation is 0, where rounding could open
different gates of the ReLU.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jax_bnar
from jax_bnar import batch_statistics
from jax_bnar._operators.renorm import batch_renorm

Arrays = tuple[Any, ...]
# A function of arrays that returns y and the mean and var of each input, or (y,) with given
# statistics.
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
    """One call, except for the values, which follow from `seed`.

    `form` is that of one input; with two, the operator adds them up and has a ReLU. The form
    "batch_statistics" is a `batch_norm` that a user has written around that operator,
    "selected_statistics" is the same where some elements count, and a form "renorm_..." is another
    one, corrected towards the `RUNNING` statistics.
    """

    inputs: int
    form: str
    given_statistics: bool
    shape: tuple[int, ...]
    axis: int
    num_groups: int
    save: str
    has_scale: tuple[bool, ...]  # of each input
    has_bias: tuple[bool, ...]
    epsilon: float
    implementation: str
    seed: int

    @property
    def numbers(self) -> tuple[str, ...]:
        """What the names of the arrays of each input end with."""
        return ("",) if self.inputs == 1 else tuple(str(i + 1) for i in range(self.inputs))

    @property
    def relu(self) -> bool:
        return self.form.endswith("_relu") and self.activation is None

    @property
    def activation(self) -> Any:
        """The activation of `bn_act` or `dual_bn_act`, or None."""
        form = self.form.removeprefix("dual_")
        return ACTIVATIONS.get(form.removeprefix("bn_add_").removeprefix("bn_"))

    @property
    def is_renorm(self) -> bool:
        return self.form.startswith("renorm_")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays that the functions take, in the order of the operators."""
        tensors = [f"x{number}" for number in self.numbers]
        if "bn_add_" in self.form and self.inputs == 1:
            tensors.append("z")
        each = zip(self.numbers, self.has_scale, self.has_bias, strict=True)
        affine = [
            f"{name}{number}"
            for number, *present in each
            for name, there in zip(("scale", "bias"), present, strict=True)
            if there
        ]
        statistics = [f"{name}{number}" for number in self.numbers for name in ("mean", "var")]
        return (*tensors, *affine, *(statistics if self.given_statistics else ()))

    @property
    def arguments(self) -> tuple[int, ...]:
        return tuple(range(len(self.names)))


def is_tensor(name: str) -> bool:
    """Whether an array has elements, and not only channels."""
    return name[0] in "xz"


# The forms that are drawn for each kind of operator, and how many arrays they normalise. Statistics
# are given only to operators of the first three kinds.
_ONE_INPUT = ("bn_add_relu", "bn_relu", "bn_add_relu", "batch_norm", "bn_add_relu")
ACTIVATIONS: Final[dict[str, Any]] = {
    "silu": jax.nn.silu,
    "leaky": functools.partial(jax.nn.leaky_relu, negative_slope=0.2),
    "hard_silu": jax.nn.hard_silu,
    "relu6": jax.nn.relu6,
    "gelu": jax.nn.gelu,
    "exact": functools.partial(jax.nn.gelu, approximate=False),
    "elu": jax.nn.elu,
    "mish": jax.nn.mish,
    "identity": jax.nn.identity,
}
KINDS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "1": (1, _ONE_INPUT),
    "2": (
        2,
        tuple(f"dual_bn_add_{name}" for name in ("relu", "silu", "relu6", "identity", "gelu")),
    ),
    "activations": (
        1,
        tuple(f"bn_{add}{name}" for name in ACTIVATIONS for add in ("add_", "")),
    ),
    "statistics": (1, ("batch_statistics", "selected_statistics")),
    "renorm": (1, tuple(f"renorm_{form}" for form in _ONE_INPUT)),
}
# What BatchRenorm corrects towards; some of the random statistics are limited by it, others not.
RUNNING: Final = {"mean": 0.1, "var": 1.3, "r_max": 1.4, "d_max": 0.3}


@st.composite
def calls(draw: st.DrawFn, first: int = 0, *, kind: str = "1", training_only: bool = False) -> Call:
    """Calls of any form, layout and flags.

    Args:
        draw: passed by Hypothesis.
        first: rotates the values of each flag. Hypothesis always tries the first ones; tests that
            have time for one example get different ones this way.
        kind: the kind of operator, one of `KINDS`.
        training_only: leaves out the inference forms.
    """
    inputs, forms = KINDS[kind]

    def one_of(*options: Any) -> Any:
        start = first % len(options)
        return draw(st.sampled_from(options[start:] + options[:start]))

    given_statistics = (
        one_of(False, False, True) and not training_only and kind in ("1", "2", "activations")
    )
    shape, axis, num_groups = one_of(*LAYOUTS)
    form = one_of(*forms)
    has_scale = one_of(True, True, True, False)
    has_bias = one_of(True, True, True, True, False)
    return Call(
        inputs=inputs,
        form=form,
        given_statistics=given_statistics,
        shape=shape,
        axis=axis,
        num_groups=1 if given_statistics else num_groups,
        save=one_of("mask", "y"),
        has_scale=(has_scale, has_bias)[:inputs],
        has_bias=(has_bias, has_scale)[:inputs],
        epsilon=one_of(1e-5, 1e-2),
        implementation=one_of("ffi", "xla", "xla", "ffi"),
        seed=draw(st.integers(0, 2**31)),
    )


def arrays(call: Call, more_seed: int = 0) -> Arrays:
    """Operands; other seeds give directions for derivatives."""
    random = np.random.default_rng([call.seed, more_seed])
    results = []
    for name in call.names:
        shape = call.shape if is_tensor(name) else (call.shape[call.axis],)
        value = random.standard_normal(shape)
        results.append(np.square(value) + 0.5 if name.startswith("var") else value + 0.25)
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
    affine = [f"{name}{number}" for number in call.numbers for name in ("scale", "bias")]
    return dict.fromkeys(affine) | dict(zip(call.names, given, strict=True))


def selected(call: Call) -> np.ndarray:
    """Which elements of x count: about two thirds, and the first ones of each group and channel."""
    positions = np.indices(call.shape)
    positions[0] %= call.shape[0] // call.num_groups
    positions[call.axis] = 0
    return (np.cos(np.arange(positions[0].size)).reshape(call.shape) < 0.5) | ~positions.any(axis=0)


def ours(call: Call, **keywords: Any) -> Function:
    """The operator as a function of arrays."""
    name = f"{call.form}_inference" if call.given_statistics else call.form
    options = {"epsilon": call.epsilon, "axis": call.axis, "implementation": call.implementation}
    if not call.given_statistics:
        options |= {"num_groups": call.num_groups, "save": call.save}
    if call.form.endswith("_statistics"):
        del options["epsilon"], options["save"]
        if call.form == "selected_statistics":
            options["where"] = selected(call)
        return formula(call, statistics=functools.partial(batch_statistics, **options, **keywords))
    if call.is_renorm:
        return functools.partial(_renormalised, call, **options, **keywords)
    if call.activation is not None:
        name = "bn_act" if call.inputs == 1 else "dual_bn_act"
        name += "_inference" if call.given_statistics else ""
        options["activation"] = call.activation

    def function(*given: Any) -> Arrays:
        result = getattr(jax_bnar, name)(**operands(call, given), **options, **keywords)
        return (result,) if call.given_statistics else tuple(result)

    return function


def _renormalised(call: Call, *given: Any, **options: Any) -> Arrays:
    """BatchRenorm's operator, which takes running statistics as arrays and has them from layers."""
    named: dict[str, Any] = {"z": None} | operands(call, given)
    channels = call.shape[call.axis]
    keywords: dict[str, Any] = {"axis_name": None, "axis_index_groups": None} | options
    result = batch_renorm(
        named["x"],
        named["z"],
        named["scale"],
        named["bias"],
        jnp.full(channels, RUNNING["mean"]),
        jnp.full(channels, RUNNING["var"]),
        RUNNING["r_max"],
        RUNNING["d_max"],
        "relu" if call.relu else "none",
        **keywords,
    )
    return tuple(result)


def formula(
    call: Call,
    axis_name: str | None = None,
    statistics: Callable[[Any], Any] | None = None,
) -> Function:
    """What the operator computes, written in plain JAX: the sum over its inputs.

    `statistics` may compute mean and var from x.
    """

    def averaged(array: jax.Array, reduced: tuple[int, ...]) -> jax.Array:
        where = True
        if call.form == "selected_statistics":
            where = selected(call).reshape(array.shape)
        mean = array.mean(reduced, keepdims=True, where=where)
        return mean if axis_name is None else jax.lax.pmean(mean, axis_name)

    def normalised(x: Any, scale: Any, bias: Any, mean: Any = None, var: Any = None) -> Arrays:
        """The batch norm of one input, with its mean and var in the shapes of the results."""
        groups = call.num_groups
        grouped = x.reshape(groups, x.shape[0] // groups, *x.shape[1:])
        channel = call.axis % x.ndim + 1
        reduced = tuple(a for a in range(1, grouped.ndim) if a != channel)
        along = [1] * grouped.ndim
        along[channel] = grouped.shape[channel]

        def spread(vector: jax.Array) -> jax.Array:
            return jnp.broadcast_to(vector, grouped.shape)

        if statistics is not None:
            mean, var = statistics(x)
        if mean is not None:
            of_groups = [groups, *along[1:]]
            mean, var = (jnp.asarray(vector).reshape(of_groups) for vector in (mean, var))
            centred = grouped - spread(mean)
        else:
            mean = averaged(grouped, reduced)
            centred = grouped - spread(mean)
            var = averaged(jnp.square(centred), reduced)
        y = centred * spread(jax.lax.rsqrt(var + call.epsilon))
        if call.is_renorm:
            running_std = np.sqrt(RUNNING["var"] + call.epsilon)
            r = jnp.sqrt(var + call.epsilon) / running_std
            d = (mean - RUNNING["mean"]) / running_std
            r = jnp.clip(r, 1 / RUNNING["r_max"], RUNNING["r_max"])
            d = jnp.clip(d, -RUNNING["d_max"], RUNNING["d_max"])
            y = y * spread(jax.lax.stop_gradient(r)) + spread(jax.lax.stop_gradient(d))
        if scale is not None:
            y = y * spread(scale.reshape(along))
        if bias is not None:
            y = y + spread(bias.reshape(along))
        shape = (along[channel],) if groups == 1 else (groups, along[channel])
        return y.reshape(x.shape), mean.reshape(shape), var.reshape(shape)

    def function(*given: Any) -> Arrays:
        named: dict[str, Any] = operands(call, tuple(map(jnp.asarray, given)))
        own = ("x", "scale", "bias", *(("mean", "var") if call.given_statistics else ()))
        each = [normalised(*(named[name + number] for name in own)) for number in call.numbers]
        y = functools.reduce(jnp.add, [y for y, *_ in each])
        if "z" in call.names:
            y = y + named["z"]
        if call.relu:
            y = jax.nn.relu(y)
        elif call.activation is not None:
            y = call.activation(y)
        statistics = [vector for _, *vectors in each for vector in vectors]
        return (y,) if call.given_statistics else (y, *statistics)

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
