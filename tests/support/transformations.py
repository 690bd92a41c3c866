"""Transformations, each a function of (f, call, values).

`f` is an operator or its formula (see `transformation_cases`). Those in COMPILED are run under jit;
those in OUTSIDE_JIT test calls that are not.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from transformation_cases import Arrays, Call, Function, Values, is_tensor, scalar

import jax_bnar

Transformation = Callable[[Function, Call, Values], Any]

OUTSIDE_JIT: Final[dict[str, Transformation]] = {}
COMPILED: Final[dict[str, Transformation]] = {}


def outside_jit(transformation: Transformation) -> Transformation:
    OUTSIDE_JIT[transformation.__name__] = transformation
    return transformation


def compiled(transformation: Transformation) -> Transformation:
    COMPILED[transformation.__name__] = transformation
    return transformation


@outside_jit
def eager(f: Function, call: Call, at: Values) -> Any:
    results, vjp = jax.vjp(f, *at.given)
    return results, vjp(results)


@outside_jit
def disabled_jit(f: Function, call: Call, at: Values) -> Any:
    with jax.disable_jit():
        return f(*at.given)


@outside_jit
def donation(f: Function, call: Call, at: Values) -> Any:
    """A step that updates all operands, so that a result may overwrite any buffer."""

    @functools.partial(jax.jit, donate_argnums=call.arguments)
    def step(*given: Any) -> Any:
        gradient = jax.grad(scalar(f), call.arguments)(*given)
        return f(*given), tuple(a - 0.1 * da for a, da in zip(given, gradient, strict=True))

    donated = [jnp.array(a) for a in at.given]
    results = step(*donated)
    assert donated[0].is_deleted()
    return results


@outside_jit
def exported(f: Function, call: Call, at: Values) -> Any:
    """Serialises and deserialises the function with its derivative."""
    export = jax.export.export(jax.jit(f), disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS)
    data = export(*at.given).serialize(vjp_order=1)
    again: Any = jax.export.deserialize(data).call
    return jax.jit(jax.value_and_grad(scalar(again), call.arguments))(*at.given)


@outside_jit
def callbacks(f: Function, call: Call, at: Values) -> Any:
    """Python callbacks before and after the call, under jit, vmap and grad."""
    seen = []

    def doubled(x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        called = functools.partial(jax.pure_callback, vmap_method="expand_dims")
        return called(lambda x: np.asarray(x) * 2, like, jax.lax.stop_gradient(x))

    def loss(*given: Any) -> Any:
        results = f(given[0] + doubled(given[0]), *given[1:])
        jax.debug.callback(lambda y: seen.append(float(y)), results[0].sum())
        return scalar(lambda: results)()

    stacked = tuple(np.stack([a, a * a + 0.1]) for a in at.given)
    results = jax.jit(jax.vmap(jax.value_and_grad(loss, call.arguments)))(*stacked)
    jax.effects_barrier()
    assert len(seen) == 2
    return results, np.sort(seen)


@compiled
def gradients(f: Function, call: Call, at: Values) -> Any:
    return f(*at.given), jax.value_and_grad(scalar(f), call.arguments)(*at.given)


@compiled
def gradient_of_one(f: Function, call: Call, at: Values) -> Any:
    """The other operands are then constants, and their tangents symbolic zeros."""
    return [jax.grad(scalar(f), argument)(*at.given) for argument in call.arguments]


@compiled
def pushed_forward(f: Function, call: Call, at: Values) -> Any:
    x, *rest = at.given
    of_x = jax.jvp(lambda x: f(x, *rest), (x,), at.one[:1])
    return jax.jvp(f, at.given, at.one), of_x


@compiled
def pulled_back(f: Function, call: Call, at: Values) -> Any:
    """Pulls back cotangents of all results at once, and of each result separately."""
    results, vjp = jax.vjp(f, *at.given)
    everything = tuple(jnp.cos(r) for r in results)
    alone = [
        tuple(c if i == j else jnp.zeros_like(c) for j, c in enumerate(everything))
        for i in range(len(everything))
    ]
    return [vjp(c) for c in (everything, *alone)]


@compiled
def jacobians(f: Function, call: Call, at: Values) -> Any:
    """Jacobians of all results, not of a scalar."""
    return [jac(f, call.arguments)(*at.given) for jac in (jax.jacfwd, jax.jacrev)]


def curved(f: Function) -> Function:
    """f of nonlinear functions of the arrays, so that tangents depend on the arrays too."""
    return lambda *given: f(*(a + jnp.sin(a) / 4 for a in given))


def second_order(outer: Any, inner: Any) -> Transformation:
    def transformation(f: Function, call: Call, at: Values) -> Any:
        return outer(inner(scalar(curved(f)), call.arguments), call.arguments)(*at.given)

    return transformation


COMPILED.update(
    {
        f"{outer.__name__}_of_{inner.__name__}": second_order(outer, inner)
        for outer in (jax.jacfwd, jax.jacrev)
        for inner in (jax.jacfwd, jax.jacrev)
    }
)


def forward_along(f: Callable[..., Any], direction: Arrays) -> Callable[..., Any]:
    """The derivative of a function along a direction, by forward mode."""
    return lambda *given: jax.jvp(f, given, direction)[1]


def reverse_along(f: Callable[..., Any], direction: Arrays) -> Callable[..., Any]:
    """The derivative of a scalar function along a direction, by reverse mode."""

    def function(*given: Any) -> Any:
        gradient = jax.grad(f, tuple(range(len(given))))(*given)
        return sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))

    return function


def third_order(inner: Any, middle: Any) -> Transformation:
    """The gradient of a second derivative along two directions."""

    def transformation(f: Function, call: Call, at: Values) -> Any:
        second = middle(inner(scalar(curved(f)), at.one), at.two)
        return jax.grad(second, call.arguments)(*at.given)

    return transformation


COMPILED.update(
    {
        f"grad_of_{middle.__name__}_of_{inner.__name__}": third_order(inner, middle)
        for middle in (forward_along, reverse_along)
        for inner in (forward_along, reverse_along)
    }
)


@compiled
def forward_over_forward_over_reverse(f: Function, call: Call, at: Values) -> Any:
    gradient = jax.grad(scalar(curved(f)), call.arguments)
    return forward_along(forward_along(gradient, at.one), at.two)(*at.given)


@compiled
def whole_third_derivative(f: Function, call: Call, at: Values) -> Any:
    """The third derivative in one operand only, because it has the cube of its size."""
    vectors = [i for i, name in enumerate(call.names) if not is_tensor(name)]
    argument = vectors[0] if vectors else 0
    return jax.jacfwd(jax.hessian(scalar(f), argument), argument)(*at.given)


@compiled
def vmap_of_grad_of_vmap(f: Function, call: Call, at: Values) -> Any:
    """Two mapped axes, each over some of the operands and in different positions."""
    inner = [i % 2 - 1 if i % 3 != 2 else None for i in call.arguments]
    outer = [None if i % 2 else 0 for i in call.arguments]
    stacked = []
    for name, array, axis, leading in zip(call.names, at.given, inner, outer, strict=True):
        if axis is not None:
            array = jnp.stack([array, array * 0.5 + 0.1, -array * array], axis)
        if leading is not None:
            array = jnp.stack([array, 1.5 * array - 0.3])
        stacked.append(jnp.abs(array) if name.startswith("var") else array)

    def loss(*given: Any) -> Any:
        return jax.vmap(scalar(f), inner)(*given).sum()

    return jax.vmap(jax.value_and_grad(loss, call.arguments), outer)(*stacked)


@compiled
def jvp_of_linearize(f: Function, call: Call, at: Values) -> Any:
    def linearized(*given: Any) -> Any:
        results, linear = jax.linearize(f, *given)
        return results, linear(*at.one)

    return jax.jvp(linearized, at.given, at.two)


@compiled
def jvp_of_transpose_of_linearize(f: Function, call: Call, at: Values) -> Any:
    def transposed(*given: Any) -> Any:
        results, linear = jax.linearize(f, *given)
        return jax.linear_transpose(linear, *given)(tuple(jnp.cos(r) for r in results))

    return jax.jvp(transposed, at.given, at.one)


@compiled
def scan(f: Function, call: Call, at: Values) -> Any:
    """A stack of blocks with different parameters; the results of each block are kept."""
    x, *rest = at.given
    stacked = tuple(jnp.stack([a, a * 0.7 + 0.1]) for a in rest)

    def step(x: Any, given: Any) -> Any:
        results = f(x, *given)
        return x * 0.5 + results[0], results

    def stack(x: Any, *stacked: Any) -> Arrays:
        x, kept = jax.lax.scan(step, x, stacked, length=2)
        return (x, *kept)

    given = (x, *stacked)
    product = jax.jvp(jax.grad(scalar(stack), call.arguments), given, given)
    return jax.value_and_grad(scalar(stack), call.arguments)(*given), product


@compiled
def cond_and_switch(f: Function, call: Call, at: Values) -> Any:
    """Branches on a traced and on a mapped predicate; the other branch has no residuals."""

    def other(*given: Any) -> Arrays:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(f, *given))

    def chosen(*given: Any) -> Arrays:
        positive = given[0].ravel()[0] > 0

        def one(predicate: Any) -> Arrays:
            return jax.lax.cond(predicate, f, other, *given)

        switched = jax.lax.switch(positive.astype(int), [f, other, f], *given)
        return (*one(positive), *switched, *jax.vmap(one)(jnp.asarray([True, False])))

    return jax.value_and_grad(scalar(chosen), call.arguments)(*at.given)


@compiled
def while_loop(f: Function, call: Call, at: Values) -> Any:
    """Trip counts depend on the data, in forward mode, and separately for mapped examples."""

    def loop(x: Any, *rest: Any) -> Any:
        def body(state: Any) -> Any:
            i, x, _ = state
            y, *statistics = f(x, *rest)
            return i + 1, y + x * 0.5, statistics

        _, *statistics = jax.tree.map(jnp.zeros_like, jax.eval_shape(f, x, *rest))
        trips = 1 + (x.ravel()[0] > 0.25).astype(int)
        return jax.lax.while_loop(lambda s: s[0] < trips, body, (0, x, statistics))[1:]

    x, *rest = at.given
    mapped = jax.vmap(lambda x: loop(x, *rest))
    return jax.jvp(loop, at.given, at.one), mapped(jnp.stack([x, 0.5 - x]))


def custom_vjp_around(f: Function) -> Function:
    around = jax.custom_vjp(f)
    around.defvjp(lambda *given: jax.vjp(f, *given), lambda vjp, cotangents: vjp(cotangents))
    return around


def custom_jvp_around(f: Function) -> Function:
    around = jax.custom_jvp(f)
    around.defjvp(lambda given, tangents: jax.jvp(f, given, tangents))
    return around


@compiled
def custom_rules_around(f: Function, call: Call, at: Values) -> Any:
    """User-defined derivative rules that call the operator."""
    custom_gradient = jax.custom_gradient(lambda *given: jax.vjp(f, *given))
    around = (custom_vjp_around(f), custom_jvp_around(f), custom_gradient)
    first = [jax.value_and_grad(scalar(g), call.arguments)(*at.given) for g in around]
    return first, forward_along(jax.grad(scalar(around[1])), at.one)(*at.given)


@compiled
def aliasing(f: Function, call: Call, at: Values) -> Any:
    """One array is several operands: its gradient is the sum of theirs."""
    same_as = {"z": "x", "bias": "scale", "var": "mean"}
    if call.inputs > 1:
        same_as = {"x2": "x1", "scale2": "scale1", "bias2": "bias1", "mean2": "mean1"}
        same_as |= {"var1": "mean1", "var2": "mean1"}

    def shared(*given: Any) -> Arrays:
        named = dict(zip(call.names, given, strict=True))
        for name in call.names:
            if name.startswith("mean"):
                named[name] = jnp.square(named[name]) + 0.5
        return f(*(named.get(same_as.get(name, name), named[name]) for name in call.names))

    return shared(*at.given), jax.grad(scalar(shared), call.arguments)(*at.given)
