"""The collective operations of a compiled program: which arrays they send, and how many bytes."""

import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax

_COLLECTIVE: Final = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
_ARRAY: Final = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array of a collective operation in compiled HLO."""

    opcode: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = int(re.sub(r"\D", "", self.dtype))
        return math.prod(self.shape) * bits // 8


def collectives(function: Any, *arguments: Any) -> list[list[Collective]]:
    """Compiles the function and returns its collective operations, each as a list of arrays."""
    return compiled_collectives(jax.jit(function).lower(*arguments).compile())


def compiled_collectives(program: jax.stages.Compiled) -> list[list[Collective]]:
    """The collective operations of a compiled program, each as a list of arrays."""
    text = program.as_text()
    assert text is not None
    return [
        [
            Collective(match[2], dtype, tuple(int(n) for n in shape.split(",") if n))
            for dtype, shape in _ARRAY.findall(match[1])
        ]
        for match in _COLLECTIVE.finditer(text)
    ]


def total_bytes(operations: Sequence[Sequence[Collective]]) -> int:
    return sum(each.nbytes for operation in operations for each in operation)
