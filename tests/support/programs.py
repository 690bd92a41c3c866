"""Counts primitives in jaxprs, and custom calls in StableHLO and in compiled HLO."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

_STABLEHLO = re.compile(r"stablehlo\.custom_call @(jax_bnar_\w+)")
_HLO = re.compile(r'custom_call_target="(jax_bnar_\w+)"')


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, including those of inner jaxprs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def primitives(function: Any, *arguments: Any) -> Counter[str]:
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return Counter(equation.primitive.name for equation in equations(jaxpr))


def ours(function: Any, *arguments: Any) -> dict[str, int]:
    """The number of our primitives in the jaxpr of `function`, by name without the prefix."""
    return {
        name.removeprefix("bnar_"): count
        for name, count in primitives(function, *arguments).items()
        if name.startswith("bnar_")
    }


def stablehlo_calls(function: Any, *arguments: Any) -> Counter[str]:
    return Counter(_STABLEHLO.findall(jax.jit(function).lower(*arguments).as_text()))


def hlo_calls(function: Any, *arguments: Any) -> Counter[str]:
    """Our calls after XLA's passes, which are those that actually run."""
    compiled = jax.jit(function).lower(*arguments).compile().as_text()
    assert compiled is not None
    return Counter(_HLO.findall(compiled))


def opcodes_of_size(size: int, function: Any, *given: Any) -> set[str]:
    """The opcodes in the compiled program with a result of at least `size` elements."""
    text = jax.jit(function).lower(*given).compile().as_text()
    assert text is not None
    entry = text[text.index("\nENTRY") :]
    opcodes = set()
    for line in entry.splitlines()[1:]:
        match = re.match(r"\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match is None:
            continue
        shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
        if any(math.prod(int(n) for n in s.split(",") if n) >= size for s in shapes):
            opcodes.add(match[2])
    return opcodes
