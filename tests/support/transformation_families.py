"""Families of transformations of `transformations`: policies of remat, nestings, named axes."""

import operator
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from transformation_cases import Arrays, Call, Function, Values, is_tensor, scalar
from transformations import (
    Transformation,
    custom_jvp_around,
    custom_vjp_around,
    forward_along,
    reverse_along,
)

import jax_bnar

_policies: Any = jax.checkpoint_policies
POLICIES: Final[dict[str, Any]] = {
    "none": None,
    "everything": _policies.everything_saveable,
    "nothing": _policies.nothing_saveable,
    "dots": _policies.dots_saveable,
    "dots without batch": _policies.dots_with_no_batch_dims_saveable,
    "dots offloaded": _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "anything but statistics": _policies.save_anything_except_these_names("bnar_statistics"),
    "any name but mask": _policies.save_any_names_but_these("bnar_mask"),
    "statistics": _policies.save_only_these_names("bnar_statistics"),
    "mask": _policies.save_only_these_names("bnar_mask"),
    "statistics and mask": _policies.save_only_these_names("bnar_statistics", "bnar_mask"),
    "dots or mask": _policies.save_from_both_policies(
        _policies.dots_saveable, _policies.save_only_these_names("bnar_mask")
    ),
    "dots and statistics": jax_bnar.checkpoint_policies.dots_and_statistics_saveable,
    "others offloaded": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["bnar_statistics"],
        names_which_can_be_offloaded=["other"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def checkpoint(policy: Any) -> Transformation:
    """A gradient and a Hessian-vector product of a block between two sines."""

    def transformation(f: Function, call: Call, at: Values) -> Any:
        def block(x: Any, *rest: Any) -> Arrays:
            return tuple(jnp.sin(r) for r in f(jnp.sin(x), *rest))

        loss = scalar(jax.checkpoint(block, policy=policy))
        product = forward_along(jax.grad(loss), at.one)(*at.given)
        return jax.value_and_grad(loss, call.arguments)(*at.given), product

    return transformation


def callback_beside(f: Function) -> Function:
    def function(*given: Any) -> Arrays:
        results = f(*given)
        jax.debug.callback(lambda y: None, results[0])
        return results

    return function


def _twice(x: Any) -> Any:
    return jnp.stack([x, x * 0.5 - 0.1])


def twice_by_vmap(f: Function) -> Function:
    def function(x: Any, *rest: Any) -> Arrays:
        results = jax.vmap(lambda x: f(x, *rest))(_twice(x))
        return tuple(r.sum(axis=0) for r in results)

    return function


def twice_by_scan(f: Function) -> Function:
    def function(x: Any, *rest: Any) -> Arrays:
        _, results = jax.lax.scan(lambda _, x: (None, f(x, *rest)), None, _twice(x))
        return tuple(r.sum(axis=0) for r in results)

    return function


def after_itself(f: Function) -> Function:
    def function(x: Any, *rest: Any) -> Arrays:
        return f(f(x, *rest)[0] + 0.5 * x, *rest)

    return function


def if_positive(f: Function) -> Function:
    def function(*given: Any) -> Arrays:
        def negated(*given: Any) -> Arrays:
            return jax.tree.map(operator.neg, f(*given))

        return jax.lax.cond(given[0].sum() > 0, f, negated, *given)

    return function


# Each maps a function to another one of the same arrays, so they can be nested.
WRAPPERS: Final[dict[str, Callable[[Function], Function]]] = {
    "after itself": after_itself,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "statistics saved": lambda f: jax.checkpoint(f, policy=POLICIES["statistics"]),
    "custom_vjp": custom_vjp_around,
    "custom_jvp": custom_jvp_around,
    "callback": callback_beside,
    "vmap": twice_by_vmap,
    "scan": twice_by_scan,
    "cond": if_positive,
}


def composition(around: list[str]) -> Transformation:
    """Nested wrappers, with a gradient and a Hessian-vector product outside."""

    def transformation(f: Function, call: Call, at: Values) -> Any:
        for name in around:
            f = WRAPPERS[name](f)
        loss = scalar(f)
        value = jax.value_and_grad(loss, call.arguments)(*at.given)
        if "custom_vjp" in around:  # custom_vjp has no forward mode
            return value, jax.grad(reverse_along(loss, at.one), call.arguments)(*at.given)
        return value, forward_along(jax.grad(loss, call.arguments), at.one)(*at.given)

    return transformation


def in_scan(f: Function) -> Function:
    """Calls f in the only step of a scan."""

    def function(*given: Any) -> Arrays:
        _, results = jax.lax.scan(lambda _, x: (None, f(x, *given[1:])), None, given[0][None])
        return tuple(r[0] for r in results)

    return function


# These trace the mapped function before a derivative of it is taken.
ENCLOSED: Final[dict[str, Callable[[Function], Function]]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "cond": if_positive,
}


def named_axis(way: str, *, own_parameters: bool) -> Transformation:
    """For an f whose statistics are taken over the axis "i" of three examples, and are unmapped.

    With `own_parameters` each example has not only its own tensors, but also scale and bias.
    """

    def transformation(f: Function, call: Call, at: Values) -> Any:
        mapped = [own_parameters or is_tensor(name) for name in call.names]
        in_axes = [0 if m else None for m in mapped]
        given = tuple(
            jnp.stack([array, 0.2 - 0.5 * array, array * array]) if m else jnp.asarray(array)
            for array, m in zip(at.given, mapped, strict=True)
        )
        out_axes = (0, *[None] * (2 * call.inputs))
        together = jax.vmap(f, in_axes, out_axes, axis_name="i")
        loss = scalar(together)
        if way == "grad outside":
            return together(*given), jax.value_and_grad(loss, call.arguments)(*given)
        if way == "grad inside":
            inside = jax.value_and_grad(scalar(f), call.arguments)
            return jax.vmap(inside, in_axes, axis_name="i")(*given)
        if way == "hessian":
            argument = call.arguments[-1]
            jacobian = jax.jacrev(jax.jacfwd(loss, argument), argument)(*given)
            return jax.hessian(loss, argument)(*given), jacobian
        if way == "hessian inside":
            inside = jax.hessian(scalar(f), call.arguments[-1])
            return jax.vmap(inside, in_axes, axis_name="i")(*given)
        gradient = jax.grad(loss, call.arguments)
        if way == "jvp":
            return forward_along(gradient, tuple(jnp.cos(a) for a in given))(*given)
        if way in ENCLOSED:
            enclosed = scalar(ENCLOSED[way](together))
            return jax.value_and_grad(enclosed, call.arguments)(*given)
        # The losses of two ensembles, with a second axis that has no name.
        ensemble = jax.vmap(lambda x: together(x, *given[1:]))
        return jax.value_and_grad(scalar(ensemble))(jnp.stack([given[0], -given[0]]))

    return transformation


NAMED_AXIS: Final[dict[str, Transformation]] = {
    way + (", own parameters" if own else ""): named_axis(way, own_parameters=own)
    for own in (False, True)
    for way in (
        "grad outside",
        "grad inside",
        "hessian",
        "hessian inside",
        "jvp",
        "in another vmap",
    )
}
