"""Functions and loops of an object file, as objdump prints them: x86-64 and aarch64."""

import dataclasses
import pathlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from typing import Final


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str
    symbol: str = ""  # what the linker puts there


@dataclasses.dataclass(frozen=True)
class Access:
    """What an instruction reads or writes in memory."""

    registers: frozenset[str]  # those of the address
    vector: bool  # to or from a vector register, or a part of one
    pointer: bool  # eight bytes to a general register
    constant: bool  # beside the code
    offset: int  # what is added to the registers
    bytes: int
    registers_moved: int  # by one instruction: two by ldp and stp of aarch64


def split_operands(text: str) -> list[str]:
    return re.split(r",\s*(?![^\[{]*[\]}])", text) if text else []


class X86:
    """How to read what objdump prints for x86-64.

    Patterns of instruction names: `call` calls a function, `jump` goes to an address within this
    one, `leaves` is not followed by the next instruction, and `_READS_ONLY` changes no register.
    """

    objdump = "objdump"
    options: tuple[str, ...] = ("-M", "intel")
    comment = re.compile(r"\s+(?:#|<)")
    stack = frozenset({"rsp", "rbp"})
    call = re.compile(r"call")
    jump = re.compile(r"j[a-z]+")
    leaves = re.compile(r"jmp|ret|ud2")
    _READS_ONLY = re.compile(r"cmp|test|bt$|j|call|push|prefetch|nop|ret")
    _BYTES: Final = {"DWORD": 4, "QWORD": 8, "XMMWORD": 16, "YMMWORD": 32, "ZMMWORD": 64}
    _SCALAR = re.compile(r"v?[a-z0-9]*(ss|sd)$|v?cvt(t?)s[sd]2|v?cvtsi")

    @staticmethod
    def whole(register: str) -> str:
        """rax for eax, ax and al."""
        if found := re.fullmatch(r"[re]?([abcd])[xhl]", register):
            return f"r{found[1]}x"
        if found := re.fullmatch(r"[re]?(si|di|sp|bp)l?", register):
            return f"r{found[1]}"
        return re.sub(r"^(r\d+)[dwb]$", r"\1", register)

    def written(self, instruction: Instruction) -> set[str]:
        """The registers that it changes, under the names of the whole ones."""
        if self._READS_ONLY.match(instruction.name):
            return set()
        operands = split_operands(instruction.operands)
        if re.fullmatch(r"i?mul|i?div|cqo|cdq|cdqe", instruction.name) and len(operands) < 2:
            return {"rax", "rdx"}
        written = operands[:2] if instruction.name.startswith("xchg") else operands[:1]
        return {self.whole(register) for register in written if re.fullmatch(r"\w+", register)}

    def access(self, instruction: Instruction) -> Access | None:
        """What it reads or writes in memory, or None."""
        memory = re.search(r"(\w*) ?(?:PTR|BCST) (?:\w\w:)?\[([^]]*)\]", instruction.operands)
        if memory is None or instruction.name in ("lea", "nop"):
            return None
        registers = re.findall(r"[a-z]\w*", memory[2])
        vector = re.search(r"\b[xyz]mm\d", instruction.operands) is not None
        offset = re.search(r"([+-]0x[0-9a-f]+)$", memory[2])
        return Access(
            frozenset(map(self.whole, registers)),
            vector and not self._SCALAR.match(instruction.name),
            not vector and memory[1] == "QWORD" and not instruction.operands.startswith("QWORD"),
            "rip" in registers,
            int(offset[1], 16) if offset else 0,
            self._BYTES.get(memory[1], 0),
            1,
        )

    def stores(self, instruction: Instruction) -> bool:
        return "PTR" in split_operands(instruction.operands)[0] and not self._READS_ONLY.match(
            instruction.name
        )


class Aarch64:
    """The same for aarch64."""

    objdump = "aarch64-linux-gnu-objdump"
    options: tuple[str, ...] = ()
    comment = re.compile(r"\s+(?://|<)")  # "#" begins a number
    stack = frozenset({"sp", "x29"})
    _BYTES: Final = {"w": 4, "x": 8, "d": 8, "q": 16, "v": 16, "{": 16}
    call = re.compile(r"blr?$")
    jump = re.compile(r"b$|b\.|cbn?z|tbn?z")
    leaves = re.compile(r"b$|br$|ret|brk")
    _READS_ONLY = re.compile(r"st|cmp|cmn|tst|ccm|prfm|nop|ret|b$|b\.|bl|cb|tb|fcmp")

    @staticmethod
    def whole(register: str) -> str:
        return re.sub(r"^w(\d+)$", r"x\1", register)

    def written(self, instruction: Instruction) -> set[str]:
        written = set()
        operands = split_operands(instruction.operands)
        if not self._READS_ONLY.match(instruction.name):
            written |= set(operands[: 2 if instruction.name.startswith("ldp") else 1])
        # [x0], #16 and [x0, #16]! change the base.
        if base := re.search(r"\[(\w+)(?:\]\s*,|[^]]*\]!)", instruction.operands):
            written.add(base[1])
        return {self.whole(register) for register in written}

    def access(self, instruction: Instruction) -> Access | None:
        memory = re.search(r"\[([^]]*)\]", instruction.operands)
        if memory is None or not re.match(r"ld|st", instruction.name):
            return None
        first = split_operands(instruction.operands)[0]
        offset = re.search(r"#(-?(?:0x)?[0-9a-f]+)", memory[1])
        pair = 2 if instruction.name.startswith(("ldp", "stp")) else 1
        return Access(
            frozenset(self.whole(r) for r in re.findall(r"\b(?:[xw]\d+|sp)", memory[1])),
            re.match(r"[qdv]\d|\{", first) is not None,
            instruction.name.startswith(("ldr", "ldp", "ldur")) and first.startswith("x"),
            False,
            int(offset[1], 0) if offset else 0,
            self._BYTES.get(first[0], 0) * pair,
            pair,
        )

    @staticmethod
    def stores(instruction: Instruction) -> bool:
        return instruction.name.startswith("st")


Machine = X86 | Aarch64


def machine_of(path: pathlib.Path) -> Machine:
    """The machine that an ELF object is for.

    Raises:
        ValueError: it is neither x86-64 nor aarch64.
    """
    machines: dict[int, type[Machine]] = {62: X86, 183: Aarch64}
    e_machine = path.read_bytes()[18]  # of the header
    if e_machine not in machines:
        raise ValueError(f"{path} is for the machine {e_machine} of ELF, not x86-64 or aarch64.")
    return machines[e_machine]()


_RELOCATION = re.compile(r"\s+[0-9a-f]+: R_\w+\s+(.*)$")
_INSTRUCTION = re.compile(
    r" *([0-9a-f]+):\s+(?:(?:bnd|notrack|rep[a-z]*|lock|data16) )*([\w.]+)\s*(.*)$"
)
# These are called between the loops over vectors.
_OUTSIDE = re.compile(r"mem(set|cpy|move)\b|.*\bHandOver<")


def is_outside(instruction: Instruction) -> bool:
    """Whether a call belongs to what is done before or after a loop over vectors."""
    return _OUTSIDE.match(instruction.symbol) is not None


def functions(machine: Machine, path: pathlib.Path) -> Iterator[tuple[str, list[Instruction]]]:
    """The name and the instructions of each function in an object file."""
    command = [machine.objdump, "-dr", "-C", "--no-show-raw-insn", *machine.options, path]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    for part in re.split(r"\n(?=[0-9a-f]{16} <)", text)[1:]:
        head, _, body = part.partition("\n")
        instructions: list[Instruction] = []
        for line in body.splitlines():
            if found := _RELOCATION.match(line):
                instructions[-1] = dataclasses.replace(instructions[-1], symbol=found[1])
            elif found := _INSTRUCTION.match(line):
                operands = re.split(machine.comment, found[3])[0].strip()
                instructions.append(Instruction(int(found[1], 16), found[2], operands))
        yield head.partition("<")[2].removesuffix(">:"), instructions


def target(machine: Machine, instruction: Instruction) -> int | None:
    """The address to which it jumps within its function, or None."""
    # A jump that the linker completes leaves the function.
    if instruction.symbol or not machine.jump.match(instruction.name):
        return None
    found = re.search(r"(?:^|, *)(?:0x)?([0-9a-f]+)$", instruction.operands)
    return int(found[1], 16) if found else None


def predecessors(machine: Machine, instructions: list[Instruction]) -> list[set[int]]:
    """For each instruction, the indices of those after which it may run."""
    places = {instruction.address: i for i, instruction in enumerate(instructions)}
    before: list[set[int]] = [set() for _ in instructions]
    for i, instruction in enumerate(instructions):
        address = target(machine, instruction)
        if address is not None and address in places:
            before[places[address]].add(i)
        if i + 1 < len(instructions) and not machine.leaves.match(instruction.name):
            before[i + 1].add(i)
    return before


def natural_loop(before: list[set[int]], head: int, tail: int) -> set[int] | None:
    """What leads to the tail without the head, or None if one can get there past the head."""
    body, waiting = {head}, [tail]
    while waiting:
        place = waiting.pop()
        if place not in body:
            if not before[place]:
                return None
            body.add(place)
            waiting += before[place]
    return body


def changed(machine: Machine, body: Iterable[Instruction]) -> set[str]:
    """The registers that any of these instructions changes."""
    return {register for instruction in body for register in machine.written(instruction)}


def is_vector_loop(machine: Machine, body: list[Instruction]) -> bool:
    """Whether vectors are read or written along memory, perhaps by a function that is called."""
    change = changed(machine, body)
    accesses = map(machine.access, body)
    return any(a and a.vector and a.registers & change for a in accesses) or any(
        machine.call.match(instruction.name) and not is_outside(instruction) for instruction in body
    )


def loops(machine: Machine, instructions: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops over vectors."""
    before = predecessors(machine, instructions)
    heads = [head for head, tails in enumerate(before) if len(tails) > 1]
    found = [natural_loop(before, head, tail) for head in heads for tail in before[head]]
    bodies = {frozenset(body): [instructions[i] for i in sorted(body)] for body in found if body}
    of_vectors = [places for places, body in bodies.items() if is_vector_loop(machine, body)]
    innermost = (p for p in of_vectors if not any(other < p for other in of_vectors))
    return [bodies[places] for places in innermost]
