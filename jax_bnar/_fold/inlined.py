"""A jaxpr without calls, in which evaluation by this package's operators is plain arithmetic.

In evaluation neither jit nor `jax.checkpoint` means anything but its body, and a BatchNorm often
lies on the other side of such a boundary from its convolution. Where a constant chooses between
values or branches, there is only the one that it chooses. `Graph` can open bodies too, but not
those with constants; here the arrays that a jitted function captured, which may be weights, become
constants of the program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend import core

from jax_bnar import plain_inference, primitive
from jax_bnar._base import jax_compat
from jax_bnar._fuse.own import own_form

_CALLS = ("jit", "pjit", "checkpoint", "remat2")
_EVALUATIONS = {
    f"bnar_{operations.inference.name}": operations.inference.signature
    for operations in primitive.OPERATIONS.values()
}


def inlined(closed: Any, arrays: Sequence[Any]) -> Any:
    """The closed jaxpr with the bodies of its calls, calls within them included.

    A jit with shardings, layouts or options of its own stays, and so does a kernel that was asked
    for (implementation="ffi").
    """
    return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args, None))(*arrays)


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], name_stack: Any, operator: Any = None
) -> list[Any]:
    """Runs the program. `operator` is the equation of our operator of which it is the body."""
    env: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        stack = equation.source_info.name_stack
        stack = stack if name_stack is None else name_stack + stack
        body = _body(equation)
        choice = _choice(equation, operands)
        results: Sequence[Any]
        if choice is not None and equation.primitive.name == "select_n":
            results = [operands[1 + choice]]
        elif body is not None or choice is not None:
            if choice is not None:
                body, operands = equation.params["branches"][choice], operands[1:]
            inner, outer = jax_compat.open_jaxpr(body), operator
            if own_form(equation) is not None:
                outer = equation
            results = _run(inner, getattr(body, "consts", ()), operands, stack, outer)
        else:
            # The user called the operator; what is in it has lines of this package.
            with jax_compat.context_of(operator or equation, stack):
                results = (_evaluation(equation) or jax_compat.binder(equation))(*operands)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _body(equation: Any) -> Any:
    if own_form(equation) == "inference":
        body = equation.params["call_jaxpr"]
        names = {inner.primitive.name for inner in body.eqns}
        asks_for_kernel = any(n.startswith("bnar_") for n in names - _EVALUATIONS.keys())
        return None if asks_for_kernel else body
    if equation.primitive.name not in _CALLS:
        return None
    is_jit = equation.primitive.name in ("jit", "pjit")
    if is_jit and not jax_compat.is_plain_jit(equation.params):
        return None
    return equation.params["jaxpr"]


def _choice(equation: Any, operands: Sequence[Any]) -> int | None:
    """Which case of a select or a `cond` runs, if a constant of the program decides it.

    Some libraries choose between the statistics of training and of evaluation so.
    """
    if equation.primitive.name not in ("select_n", "cond"):
        return None
    which = operands[0]
    return None if isinstance(which, jax.core.Tracer) or np.ndim(which) != 0 else int(which)


def _evaluation(equation: Any) -> Callable[..., Sequence[Any]] | None:
    """The arithmetic of an operator with given statistics, if the equation is one."""
    signature = _EVALUATIONS.get(equation.primitive.name)
    if signature is None:
        return None
    present = equation.params["present"]
    params = equation.params
    names = ("layout", "epsilon", "activation", "negative_slope", "out_dtype")
    statics = {name: params[name] for name in names if name in params}

    def evaluated(*given: Any) -> Sequence[Any]:
        return [plain_inference.inference(*signature.unpack_structured(given, present), **statics)]

    return evaluated
