"""What a compiled program launches and moves, counted in its text.

Each kernel is charged with each of its operands and results once, as a roofline would: what it
reads again, and what it finds in a cache, is not counted. A loop fusion computes each element of
its result from one element of each operand, so it reads at most as many as it has results.
"""

import math
import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, get_args

from jax_bnar.profile import _hlo

# ours: calls of jax_bnar. library: other calls, and fusions that multiply matrices.
Kind = Literal["ours", "convolution", "library", "fusion", "copy", "other"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_COPIES: Final = ("copy", "copy-start", "transpose")
_COLLECTIVES: Final = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
# These run other computations, once or as often as they say.
_CALLERS: Final = ("call", "while", "async-start")
_CALLED: Final = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_TRIPS: Final = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_INDEX: Final = re.compile(r"\bindex=(\d+)")


class Kernel(NamedTuple):
    """An instruction that runs something on the device.

    Attributes:
        target: the name of a call, otherwise the opcode.
        reads: the bytes that it reads of each array, by name.
        writes: the bytes of each array that it writes, by name.
        times: how often it runs, more than once in a loop.
    """

    kind: Kind
    target: str
    reads: dict[str, int]
    writes: dict[str, int]
    times: int = 1

    @property
    def nbytes(self) -> int:
        """What it moves each time."""
        return sum(self.reads.values()) + sum(self.writes.values())

    def after(self, previous: "Kernel") -> int:
        """The bytes that it reads of arrays that the previous kernel has read or written."""
        touched = previous.reads.keys() | previous.writes.keys()
        return sum(size for name, size in self.reads.items() if name in touched)


def kernels(text: str) -> list[Kernel]:
    """The kernels of a compiled program in the order in which they are scheduled.

    Collectives are left out: they do not run at the memory's rate.
    """
    computations, entry = _hlo.parse(text)
    return list(_kernels(entry, computations, 1))


def _kernels(
    computation: _hlo.Computation, computations: dict[str, _hlo.Computation], times: int
) -> Iterator[Kernel]:
    owner: dict[str, str] = {}  # of an alias: the array, by the instruction that wrote it
    for name, instruction in computation.items():
        operands = instruction.operands
        if instruction.opcode in _hlo.FREE or instruction.opcode.endswith("-done"):
            source = owner.get(operands[0], operands[0]) if operands else name
            index = _INDEX.search(instruction.text)
            if instruction.opcode == "get-tuple-element" and index is not None:
                source = f"{source}.{index[1]}"
            owner[name] = source
        elif instruction.opcode.removesuffix("-start") in _COLLECTIVES:
            continue
        elif instruction.opcode in _CALLERS:
            called = _CALLED.search(instruction.text)
            trips = _TRIPS.search(instruction.text)
            inner = computations[called[1]] if called else {}
            yield from _kernels(inner, computations, times * int(trips[1] if trips else 1))
        else:
            yield _kernel(instruction, computation, computations, owner, times)


def _kernel(
    instruction: _hlo.Instruction,
    computation: _hlo.Computation,
    computations: dict[str, _hlo.Computation],
    owner: dict[str, str],
    times: int,
) -> Kernel:
    called = _CALLED.search(instruction.text)
    inside = computations.get(called[1], {}) if called and instruction.opcode == "fusion" else {}
    target = _hlo.TARGET.search(instruction.text)
    kind = _kind(instruction, {each.opcode for each in inside.values()}, target and target[1])
    most = None
    if "kind=kLoop" in instruction.text:
        most = max((math.prod(array.shape) for array in instruction.arrays), default=0)
    reads = {
        owner.get(operand, operand): sum(_read(a, most) for a in computation[operand].arrays)
        for operand in dict.fromkeys(instruction.operands)
        if operand in computation
    }
    # The result of a copy that starts is a tuple of it, the operand and a handle.
    arrays = instruction.results[: 1 if instruction.opcode == "copy-start" else None]
    names = [f"{instruction.name}.{i}" for i in range(len(arrays))]
    if len(instruction.arrays) == 1:
        names = [instruction.name]
    writes = {name: array.bytes for name, array in zip(names, arrays, strict=True)}
    return Kernel(kind, target[1] if target else instruction.opcode, reads, writes, times)


def _read(array: _hlo.Array, most: int | None) -> int:
    """The bytes of an operand, or of as many elements of it as there are results."""
    elements = math.prod(array.shape)
    if most is None or elements <= most:
        return array.bytes
    return array.bytes * most // elements


def _kind(instruction: _hlo.Instruction, inside: set[str], target: str | None) -> Kind:
    opcodes = {instruction.opcode, *inside}
    if target is not None and target.startswith("jax_bnar_"):
        return "ours"
    if "convolution" in opcodes or (target is not None and "conv" in target.lower()):
        return "convolution"
    if target is not None or "dot" in opcodes:
        return "library"
    if instruction.opcode == "fusion":
        return "fusion"
    return "copy" if instruction.opcode in _COPIES else "other"
