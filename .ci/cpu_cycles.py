"""How far inner loops are from their loads and stores alone: cpu_cycles.py --cpu NAME OBJECT...

Objects are as in cpu_instructions.py. llvm-mca (Debian: llvm-19) says how many cycles a turn of a
loop takes on a processor, such as znver3, sapphirerapids, neoverse-v2 or apple-m1, if all data are
in the first-level cache and no jump is mispredicted. The same is asked of the loop's loads and
stores of arrays alone. Where both are equal, arithmetic and conversions cost nothing beside them;
how fast arrays come from memory is another matter, for which the last column has the bytes that
a turn reads and writes, by cycle.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence

import machine_code
from cpu_instructions import Loop, loops_of
from machine_code import X86, Aarch64, Instruction, Machine

_REGISTERS = {16: "xmm0", 32: "ymm0", 64: "zmm0"}
_CLASSES = {
    "multiply, add": r"v?f?n?(add|sub|mul|fm\w*|max|min)(p[sd]|\d+p[sd])$|f(add|sub|mla|mls|mul)",
    "compare, select": r"v?(cmp\w*|blend\w*|andn?p[sd]|and\w*|or\w*|pand\w*|por\w*|k\w+|movmsk\w*)"
    r"$|fcm|bs[li]|bi[ft]|and|orr",
    "convert, shift, permute": r"v?(p(sh|s[rl]|un|ack|erm|bro|mov)|cvt|perm|broadc|unp|insert|ext|"
    r"shuf|shl|padd|psub)\w*|(fcvt|sh|us|ss|xtn|zip|uzp|addhn|raddhn|uaddw|ext|dup|trn|bf)",
}


@dataclasses.dataclass(frozen=True)
class Cycles:
    """A loop's cycles a turn, those of its loads and stores alone, and the bytes of these."""

    loop: Loop
    all: float
    memory: float
    bytes: int
    classes: collections.Counter[str]

    @property
    def ratio(self) -> float:
        return self.all / self.memory


def cycles_of(tool: str, cpu: str, machine: Machine, loop: Loop) -> Cycles | None:
    moves = {instruction.address for instruction in loop.moves}
    body = [i for i in loop.instructions if not machine.call.match(i.name)]
    arrays = [i for i in body if _reads_or_writes_an_array(machine, i) and i.address not in moves]
    bytes_ = sum(access.bytes for i in arrays if (access := machine.access(i)) is not None)
    if not arrays:
        return None
    memory = [_alone(machine, instruction) for instruction in arrays]
    return Cycles(
        loop,
        _asked(tool, cpu, machine, [_text(machine, instruction) for instruction in body]),
        _asked(tool, cpu, machine, memory),
        bytes_,
        collections.Counter(_class(machine, instruction) for instruction in body),
    )


def _reads_or_writes_an_array(machine: Machine, instruction: Instruction) -> bool:
    access = machine.access(instruction)
    return access is not None and access.vector and not access.constant


def _alone(machine: Machine, instruction: Instruction) -> str:
    """The load or store of an instruction that may compute as well."""
    if isinstance(machine, Aarch64):
        return _text(machine, instruction)
    found = re.search(r"\w+ (?:PTR|BCST) \[[^]]*\]", instruction.operands)
    access = machine.access(instruction)
    assert found is not None
    assert access is not None
    place = found[0].replace("BCST", "PTR")
    register = _REGISTERS.get(access.bytes)
    if register is None:
        return f"mov {place}, rax" if machine.stores(instruction) else f"mov rax, {place}"
    operands = (place, register) if machine.stores(instruction) else (register, place)
    return f"{'v' if instruction.name.startswith('v') else ''}movups {', '.join(operands)}"


def _text(machine: Machine, instruction: Instruction) -> str:
    if machine.jump.match(instruction.name):
        kept, _, _ = instruction.operands.rpartition(",")  # cbnz x0, 40
        return f"{instruction.name} {kept + ', ' if kept else ''}.Lbegin"
    operands = re.sub(r"(\[rip[^]]*\])", "[rip+0x40]", instruction.operands)
    return f"{instruction.name} {operands}"


def _class(machine: Machine, instruction: Instruction) -> str:
    access = machine.access(instruction)
    name = instruction.name
    for kind, pattern in _CLASSES.items():
        if re.match(pattern, name) and re.search(r"[xyz]mm|\b[vqd]\d|k\d", instruction.operands):
            return kind
    if access is not None:
        return "store" if machine.stores(instruction) else "load"
    return "loop"


def _asked(tool: str, cpu: str, machine: Machine, lines: Sequence[str]) -> float:
    """Cycles of a turn, when many follow each other."""
    x86 = isinstance(machine, X86)
    text = "\n".join([".intel_syntax noprefix" if x86 else "", ".Lbegin:", *lines, ""])
    turns = 200
    finished = subprocess.run(
        [
            tool,
            f"-march={'x86-64' if x86 else 'aarch64'}",
            f"-mcpu={cpu}",
            *([] if x86 else ["-mattr=+bf16"]),
            f"-iterations={turns}",
        ],
        input=text,
        capture_output=True,
        text=True,
    )
    found = re.search(r"Total Cycles:\s+(\d+)", finished.stdout)
    if found is None or "error:" in finished.stderr:
        sys.exit(f"llvm-mca does not understand a loop:\n{text}\n{finished.stderr}")
    return int(found[1]) / turns


def _table(cycles: Iterable[Cycles]) -> None:
    groups: dict[tuple[str, str, str], list[Cycles]] = collections.defaultdict(list)
    for one in cycles:
        groups[one.loop.isa, one.loop.kernel, one.loop.elements].append(one)
    print(
        f"{'instructions':13}{'kernel':22}{'elements':10}{'loops':>6}{'cycles a turn':>14}"
        f"{'by loads and stores':>20}{'ratio':>7}{'worst':>7}{'bytes a cycle':>14}"
    )
    for (isa, kernel, elements), group in sorted(groups.items()):
        middle = sorted(group, key=lambda one: one.ratio)[len(group) // 2]
        print(
            f"{isa:13}{kernel:22}{elements:10}{len(group):6}{middle.all:14.1f}{middle.memory:20.1f}"
            f"{middle.ratio:7.2f}{max(one.ratio for one in group):7.2f}"
            f"{middle.bytes / middle.all:14.1f}"
        )
    ratios = [one.ratio for group in groups.values() for one in group]
    print(f"all: {len(ratios)} loops, ratio {statistics.median(ratios):.2f} in the middle")


def _instructions(cycles: Iterable[Cycles]) -> None:
    for one in cycles:
        counts = ", ".join(f"{count} {kind}" for kind, count in one.classes.most_common())
        print(f"{one.loop.isa} {one.loop.kernel} {one.loop.function}")
        print(f"  {one.all:.1f} cycles: {counts}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+", type=pathlib.Path)
    parser.add_argument("--cpu", required=True, help="a processor that llvm-mca knows")
    parser.add_argument("--tool", default="llvm-mca-19", help="the program (default: %(default)s)")
    parser.add_argument(
        "--each", action="store_true", help="the kinds of instructions of each loop"
    )
    options = parser.parse_args(arguments)
    if shutil.which(options.tool) is None:
        sys.exit(f"{options.tool} was not found (Debian: llvm-19); --tool names another")
    found = []
    for path in options.objects:
        machine = machine_code.machine_of(path)
        for loop in loops_of(path):
            if (cycles := cycles_of(options.tool, options.cpu, machine, loop)) is not None:
                found.append(cycles)
    (_instructions if options.each else _table)(found)


if __name__ == "__main__":
    main(sys.argv[1:])
