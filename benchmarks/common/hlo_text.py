"""Instructions of compiled HLO: what each does, and how many elements it writes."""

import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_INSTRUCTION: Final = re.compile(r"= \(?\w+\[([\d,]*)\].*? ([\w-]+)\(")
# XLA:GPU may move a part of the entry computation into one that it replays as a CUDA graph.
_ENTRY: Final = re.compile(r"^(?:ENTRY |%command_buffer).*?^}", re.DOTALL | re.MULTILINE)
# Another order of the same elements. What costs nothing is a `bitcast` by then.
_CHANGES_OF_LAYOUT: Final = ("copy", "copy-start", "transpose")


class Instruction(NamedTuple):
    """A line of HLO; of a tuple `elements` are those of its first array."""

    text: str
    opcode: str
    elements: int


def instructions(program: str) -> Iterator[Instruction]:
    """Those of all computations, so inside of fusions too."""
    for line in program.splitlines():
        if match := _INSTRUCTION.search(line):
            elements = math.prod(int(n) for n in match[1].split(",") if n)
            yield Instruction(line.strip(), match[2], elements)


def entry(program: str) -> str:
    """The text of the computations whose instructions are kernels and calls."""
    return "\n".join(_ENTRY.findall(program))


def layout_changes(program: str, least_elements: int) -> list[str]:
    """The lines with a copy or a transpose of at least so many elements.

    The kernels take row-major arrays. Where XLA has chosen another layout for a neighbour, or does
    not see that a reshape is free, it moves the whole array, which costs as much as a pass of ours.
    """
    return [
        instruction.text
        for instruction in instructions(program)
        if instruction.opcode in _CHANGES_OF_LAYOUT and instruction.elements >= least_elements
    ]
