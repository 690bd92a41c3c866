"""Parses the instructions of compiled HLO: the opcode of each, and how many elements it writes."""

import math
import re
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

_INSTRUCTION: Final = re.compile(r"= \(?\w+\[([\d,]*)\].*? ([\w-]+)\(")
# XLA:GPU may move part of the entry computation into a command buffer, to replay as a CUDA graph.
_ENTRY: Final = re.compile(r"^(?:ENTRY |%command_buffer).*?^}", re.DOTALL | re.MULTILINE)
# Instructions that reorder elements in memory. Compiled HLO has a `bitcast` where nothing moves.
_CHANGES_OF_LAYOUT: Final = ("copy", "copy-start", "transpose")


class Instruction(NamedTuple):
    """A line of HLO. If the result is a tuple, `elements` counts its first array."""

    text: str
    opcode: str
    elements: int


def instructions(program: str) -> Iterator[Instruction]:
    """The instructions of all computations, including those inside fusions."""
    for line in program.splitlines():
        if match := _INSTRUCTION.search(line):
            elements = math.prod(int(n) for n in match[1].split(",") if n)
            yield Instruction(line.strip(), match[2], elements)


def entry(program: str) -> str:
    """The text of the computations whose instructions are kernels and calls."""
    return "\n".join(_ENTRY.findall(program))


def layout_changes(program: str, least_elements: int, weights: Collection[int] = ()) -> list[str]:
    """The lines that copy or transpose at least `least_elements` elements.

    Arrays with as many elements as one of the `weights` are not activations, and are left out.

    The kernels take row-major arrays. If XLA has chosen another layout for a neighbouring
    operation, or misses that a reshape is free, it moves the whole array, which costs as much as
    one of our passes.
    """
    return [
        instruction.text
        for instruction in instructions(program)
        if instruction.opcode in _CHANGES_OF_LAYOUT
        and instruction.elements >= least_elements
        and instruction.elements not in weights
    ]
