"""How much memory a program takes: as XLA has planned it, and what forward keeps for backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var


class PlannedMemory(NamedTuple):
    """In bytes.

    Attributes:
        peak: arguments, results and temporaries together; an alias counts once.
        temporary: what lives only within the program.
    """

    peak: int
    temporary: int


def planned_memory(program: jax.stages.Compiled) -> PlannedMemory | None:
    """What XLA has planned, or None where the platform does not say."""
    # XLA's own `peak_memory_in_bytes` lacks the temporaries on the CPU.
    analysis: Any = program.memory_analysis()
    if analysis is None:
        return None
    outside = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    outside -= analysis.alias_size_in_bytes
    return PlannedMemory(outside + analysis.temp_size_in_bytes, analysis.temp_size_in_bytes)


def residual_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """What forward keeps for backward, beside its arguments, each array once.

    Counted in the jaxpr, before XLA, which may compute some of it anew in a plain network.
    """
    jaxpr = jax.make_jaxpr(lambda *given: jax.tree.leaves(jax.vjp(function, *given)[1]))(
        *arguments
    ).jaxpr
    given = {id(variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    kept: dict[int, Any] = {
        id(variable): variable.aval
        for variable in jaxpr.outvars
        if isinstance(variable, Var) and id(variable) not in given
    }
    return sum(aval.size * aval.dtype.itemsize for aval in kept.values())
