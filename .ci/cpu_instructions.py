"""Finds what leaves its register in the kernels' inner loops: cpu_instructions.py OBJECT...

An object is a kernel of cpu/isa that was compiled for x86-64 or aarch64, by GCC or Clang; CMake's
targets bnar_tiles_ISA make them. In the inner loops that read or write vectors nothing calls a
function or loads a pointer again, no vector is put together on the stack from pieces (a load that
is wider than the stores before it waits until they are in the cache), and whole vectors go to the
stack and back only where ALLOWED gives a reason.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import sys

import machine_code
from machine_code import Aarch64, Access, Instruction, Machine


@dataclasses.dataclass(frozen=True)
class Allowance:
    """How many instructions of a loop may move whole vectors to or from the stack.

    Attributes:
        isas, kernels, elements: regular expressions; an instruction set of aarch64 is "aarch64",
            and the kernel rows_apply for two inputs is "rows_apply<2>".
        moves: the most that Debian's GCC 12 and Clang 14 need.
        reason: why the registers do not suffice.
    """

    isas: str
    kernels: str
    elements: str
    moves: int
    reason: str

    def covers(self, loop: "Loop") -> bool:
        return bool(
            re.fullmatch(self.isas, loop.isa)
            and re.fullmatch(self.kernels, loop.kernel)
            and re.fullmatch(self.elements, loop.elements)
        )


ALLOWED = (
    Allowance("avx2", ".*<2>", ".*", 42, "two inputs have twice the constants"),
    Allowance("avx2", "rows_apply", "BFloat16|Float16", 12, "constants of the rounding"),
    Allowance("avx2", "planes_apply", "Float16", 1, "Clang keeps a constant there, beside a mask"),
    Allowance("avx2", "rows_statistics", "Float16", 17, "the median of five rows"),
    Allowance("baseline", ".*<2>", "float", 25, "two inputs have twice the constants"),
    Allowance("baseline", ".*<2>", "BFloat16", 42, "two inputs, constants of the rounding"),
    Allowance("baseline", ".*<2>", "Float16", 157, "two inputs, float16 by arithmetic"),
    Allowance("baseline", ".*<2>", "double", 112, "two inputs, vectors of four registers"),
    Allowance("baseline", "rows_apply", "BFloat16", 12, "constants of the rounding"),
    Allowance("baseline", "rows_(statistics|reduce)", "float|BFloat16", 6, "sums of two rows"),
    Allowance("baseline", ".*", "Float16", 73, "float16 is converted by arithmetic"),
    Allowance("baseline", ".*", "double", 36, "vectors of eight doubles take four registers"),
    Allowance("aarch64", ".*<2>", ".*", 54, "two inputs have twice the constants"),
    Allowance("aarch64", "rows_apply", "BFloat16|Float16", 6, "constants of the rounding"),
    Allowance("aarch64", "rows_statistics", ".*", 1, "GCC keeps a weight of the merge there"),
    Allowance("aarch64", "planes_reduce", "float|double", 3, "Clang keeps a sum in memory"),
    Allowance("aarch64", "(rows|planes)_curves", ".*", 1, "GCC keeps the bits of the lanes there"),
    Allowance(".*", "curves", ".*", 80, "parts side by side, constants of e^x and erfc"),
    Allowance(
        "baseline|avx.*", "(rows|planes)_curves", ".*", 6, "Clang peels strips of one vector"
    ),
    Allowance("avx.*", "rows_reduce", ".*", 6, "Clang peels the columns: sums lie in their array"),
    Allowance("avx512.*", "rows_reduce<2>", "BFloat16|Float16", 4, "the same"),
)


@dataclasses.dataclass(frozen=True)
class Loop:
    """An inner loop and what should not be in it.

    Attributes:
        isa, kernel, elements: as in Allowance.
        function: the function's name.
        instructions: all of them.
        moves: those that move a whole vector to or from the stack.
        pieces: loads from the stack of registers of which a store has written only a part.
        pointers: loads of pointers.
        calls: calls of functions.
    """

    isa: str
    kernel: str
    elements: str
    function: str
    instructions: list[Instruction]
    moves: list[Instruction]
    pieces: list[Instruction]
    pointers: list[Instruction]
    calls: list[Instruction]

    @property
    def allowed(self) -> int:
        return max((one.moves for one in ALLOWED if one.covers(self)), default=0)

    @property
    def is_wrong(self) -> bool:
        return len(self.moves) > self.allowed or bool(self.pieces or self.pointers or self.calls)

    def __str__(self) -> str:
        return (
            f"{self.isa} {self.kernel} {self.function}: in a loop of {len(self.instructions)}"
            f" instructions {len(self.moves)} moves of vectors to or from the stack"
            f" ({self.allowed} allowed), {len(self.pieces)} loads of pieces,"
            f" {len(self.pointers)} loads of pointers, {len(self.calls)} calls"
        )


def loops_of(path: pathlib.Path) -> list[Loop]:
    machine = machine_code.machine_of(path)
    kernel = path.name.partition(".")[0]
    return [
        _judged(machine, kernel + _inputs(name), name, body)
        for name, instructions in machine_code.functions(machine, path)
        for body in machine_code.loops(machine, instructions)
    ]


def _inputs(function: str) -> str:
    """What names the number of inputs of a function: "<2>", or nothing for one."""
    found = re.search(r"(?:Normalise|Reduce|Apply)<[\w:]+, [\w:]+, (\d+)", function)
    if found is None:  # binutils does not demangle every lambda of Clang's.
        found = re.search(r"(?:Normalise|Reduce|Apply)I\w+?Li(\d+)E", function)
    return "" if found is None or found[1] == "1" else f"<{found[1]}>"


def _judged(machine: Machine, kernel: str, function: str, body: list[Instruction]) -> Loop:
    change = machine_code.changed(machine, body)
    accesses = [(i, access) for i in body if (access := machine.access(i)) is not None]
    accesses = [(i, access) for i, access in accesses if not access.constant]
    # What is always at the same address could be in a register.
    moves = [(i, a) for i, a in accesses if a.vector and not a.registers & change]
    stores = [access for i, access in moves if machine.stores(i)]
    isa = re.search(r"cpu(?:::|\d+)(avx512bf16|avx512|avx2|baseline)", function)
    elements = re.search(r"BFloat16|Float16|\bfloat\b|\bdouble\b", function)
    return Loop(
        "aarch64" if isinstance(machine, Aarch64) else isa[1] if isa else "unknown",
        kernel,
        elements[0] if elements else "unknown",
        function,
        body,
        [i for i, _ in moves],
        [i for i, a in moves if not machine.stores(i) and _is_pieces(a, stores)],
        [i for i, a in accesses if a.pointer and not a.registers & (machine.stack | change)],
        [i for i in body if machine.call.match(i.name) and not machine_code.is_outside(i)],
    )


def _is_pieces(load: Access, stores: list[Access]) -> bool:
    """Whether a store of the loop has written only a part of a register that is loaded."""
    size = load.bytes // load.registers_moved
    same = [store for store in stores if store.registers == load.registers]
    return any(
        store.offset < begin + size
        and begin < store.offset + store.bytes
        and not (store.offset <= begin and begin + size <= store.offset + store.bytes)
        for begin in range(load.offset, load.offset + load.bytes, max(size, 1))
        for store in same
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+", type=pathlib.Path)
    loops = [loop for path in parser.parse_args(arguments).objects for loop in loops_of(path)]
    for loop in filter(lambda loop: loop.is_wrong, loops):
        print(loop)
    counts = collections.Counter(loop.isa for loop in loops)
    for isa, count in sorted(counts.items()):
        of_isa = [loop for loop in loops if loop.isa == isa]
        spilling = sum(bool(loop.moves) for loop in of_isa)
        wrong = sum(loop.is_wrong for loop in of_isa)
        print(f"{isa}: {count} loops; {spilling} move vectors to or from the stack; {wrong} wrong")
    return 1 if any(loop.is_wrong for loop in loops) or not loops else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
