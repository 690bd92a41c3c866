"""Evaluates a function in float64, whatever dtypes it specifies: the oracle for a whole network.

Libraries that fix float32 inside their layers cannot run in float64. The program is therefore
traced as it is, and each equation is evaluated with float64 instead of float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


def widened(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function that takes the leaves of `args` in float64, and returns those of the result."""
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *given: jax.tree.leaves(function(*tree.unflatten(given))))(
        *leaves
    )

    def run(*given: Any) -> list[Any]:
        results = _evaluate(closed.jaxpr, [*map(_wide, closed.consts), *given])
        assert all(result.dtype != jnp.float32 for result in results)
        return results

    return run


def _evaluate(jaxpr: core.Jaxpr, args: list[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(atom: Any) -> Any:
        return _wide(atom.val) if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        env.update(zip(equation.outvars, _results(equation, operands), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in ("jit", "pjit"):
        return _evaluate(params["jaxpr"].jaxpr, [*map(_wide, params["jaxpr"].consts), *operands])
    if primitive.name == "custom_jvp_call":
        assert "max" in str(params["call_jaxpr"]), "no other than ReLU is expected"
        return [jax.nn.relu(*operands)]
    assert not list(core.jaxprs_in_params(params)), primitive.name
    params = {name: _wide_dtype(value) for name, value in params.items()}
    result = primitive.bind(*operands, **primitive.get_bind_params(params))
    return result if primitive.multiple_results else [result]


def _wide_dtype(value: Any) -> Any:
    return jnp.dtype(jnp.float64) if isinstance(value, np.dtype) and value == jnp.float32 else value


def _wide(value: Any) -> Any:
    array = jnp.asarray(value)
    return array.astype(jnp.float64) if array.dtype == jnp.float32 else array
