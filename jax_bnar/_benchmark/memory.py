"""The memory of a program: what XLA has planned, and what forward keeps for backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var


class PlannedMemory(NamedTuple):
    """The planned memory of a program, in bytes.

    Attributes:
        peak: arguments, results and temporaries together; aliased memory counts once.
        temporary: memory that is only used while the program runs.
    """

    peak: int
    temporary: int


def planned_memory(program: jax.stages.Compiled) -> PlannedMemory | None:
    """What XLA has planned, or None if the platform does not report it."""
    # On the CPU, XLA's own `peak_memory_in_bytes` does not include the temporaries.
    analysis: Any = program.memory_analysis()
    if analysis is None:
        return None
    outside = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    outside -= analysis.alias_size_in_bytes
    return PlannedMemory(outside + analysis.temp_size_in_bytes, analysis.temp_size_in_bytes)


def residual_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """The bytes that forward keeps for backward in addition to its arguments, each array once.

    They are counted in the jaxpr. XLA may later choose to recompute some of these arrays in a plain
    network.
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
