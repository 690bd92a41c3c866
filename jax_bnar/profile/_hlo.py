"""The operators of a compiled program, read from its HLO text, with MegEngine's type names."""

import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[subf]\w*\d+\w*)\[([\d,]*)\]")
_REFERENCE = re.compile(r"%([\w.-]+)")
_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_DIM_LABELS = re.compile(r"dim_labels=[\w?]+_([\w?]+)->")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2}

# These opcodes name something that exists already, and run nothing.
FREE = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier"),
    *("partition-id", "replica-id"),
}
# Inside a fusion, these opcodes move values and compute none.
_MOVES = FREE | {
    *("broadcast", "reshape", "transpose", "copy", "convert", "slice", "pad", "reverse"),
    *("concatenate", "dynamic-slice", "dynamic-update-slice", "gather", "bitcast-convert", "iota"),
}
_MODES = {"maximum": "MAX", "add": "ADD", "multiply": "MUL", "subtract": "SUB", "divide": "DIV"}


@dataclasses.dataclass(frozen=True)
class Array:
    """The dtype and the shape of one HLO array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.search(r"\d+", self.dtype)
            bits = int(digits[0]) if digits else 8
        return -(-math.prod(self.shape) * bits // 8)


@dataclasses.dataclass(frozen=True)
class HloOperator:
    """An instruction of the entry computation that runs something.

    Attributes:
        name: its name in the profiler.
        op_name: the part of the program that it computes, as JAX named it; may be empty.
        kind: its type in MegEngine's terms, or "FusedBatchNorm" for our kernels.
        mode: what it does, if the type alone does not say so; otherwise None.
        inputs: the instructions whose results it reads.
        in_arrays: the arrays that it reads.
        out_arrays: the arrays that it writes.
        computation: the number of arithmetic operations.
    """

    name: str
    op_name: str
    kind: str
    mode: str | None
    inputs: tuple[str, ...]
    in_arrays: tuple[Array, ...]
    out_arrays: tuple[Array, ...]
    computation: int

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in (*self.in_arrays, *self.out_arrays))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
        name: without the percent sign.
        opcode: as HLO spells it.
        arrays: the result, or the parts of it if it is a tuple.
        operands: the names of the instructions that it reads.
        text: what follows the opcode's parenthesis: operands and attributes.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def elements(self) -> int:
        return sum(math.prod(array.shape) for array in self.arrays)

    @property
    def results(self) -> tuple[Array, ...]:
        """The arrays without the scratch memory of a custom call, of which it uses what it needs.

        cuDNN, cuBLAS and the kernels of jax_bnar have it as their last result, a row of bytes.
        Of the up to 16 MiB of jax_bnar's, kernels touch what the messages of their blocks take.
        """
        if self.opcode != "custom-call" or len(self.arrays) < 2:
            return self.arrays
        last = self.arrays[-1]
        is_scratch = last.dtype in ("u8", "s8") and len(last.shape) == 1
        return self.arrays[:-1] if is_scratch else self.arrays


Computation = dict[str, Instruction]


def operators(text: str) -> list[HloOperator]:
    """The operators of the entry computation, in the order in which they are scheduled."""
    computations, entry = parse(text)
    owner: dict[str, str] = {}  # maps an alias of an array to the instruction that wrote the array
    found = []
    has_gradients = "/transpose(" in text
    for instruction in entry.values():
        if instruction.opcode in FREE:
            source = instruction.operands[0] if instruction.operands else instruction.name
            is_alias = instruction.opcode in ("bitcast", "get-tuple-element", "opt-barrier")
            owner[instruction.name] = owner.get(source, source) if is_alias else instruction.name
            continue
        owner[instruction.name] = instruction.name
        # An array that is read twice counts as one operand.
        read = dict.fromkeys(o for o in instruction.operands if o in entry)
        called = _called(instruction, computations)
        kind, mode = _classify(instruction, called)
        name = _OP_NAME.search(instruction.text)
        if kind == "ConvolutionForward" and name is None and has_gradients:
            # XLA rewrites the gradients of convolution kernels, which then lose their names, while
            # forward convolutions keep theirs.
            kind = "ConvolutionBackward"
        found.append(
            HloOperator(
                name=instruction.name,
                op_name=name[1] if name else "",
                kind=kind,
                mode=mode,
                inputs=tuple(owner.get(operand, operand) for operand in read),
                in_arrays=tuple(a for operand in read for a in entry[operand].arrays),
                out_arrays=instruction.results,
                computation=_computation(instruction, entry, called),
            )
        )
    return found


def parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """All computations by name, and the entry computation."""
    computations: dict[str, Computation] = {}
    entry: Computation = {}
    current: Computation = {}
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            current = computations.setdefault(heading[2], {})
            if heading[1]:
                entry = current
        elif match := _INSTRUCTION.match(line):
            name, result, opcode, rest = match.groups()
            arrays = tuple(
                Array(dtype, tuple(int(n) for n in shape.split(",") if n))
                for dtype, shape in _SHAPE.findall(result)
            )
            operands = tuple(_REFERENCE.findall(_within_parentheses(rest)))
            current[name] = Instruction(name, opcode, arrays, operands, rest)
    return computations, entry


def _within_parentheses(rest: str) -> str:
    depth = 1
    for place, character in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return rest


def _called(instruction: Instruction, computations: dict[str, Computation]) -> Computation:
    """The computation that a fusion or a call runs.

    It is {} for other instructions: if they have a `to_apply`, it is the function of a reduction.
    """
    if instruction.opcode not in ("fusion", "call"):
        return {}
    match = _CALLS.search(instruction.text)
    return computations.get(match[1], {}) if match else {}


def _classify(instruction: Instruction, called: Computation) -> tuple[str, str | None]:
    """Returns (type, mode)."""
    target = TARGET.search(instruction.text)
    if target and target[1].startswith("jax_bnar_"):
        return "FusedBatchNorm", _mode_of_ours(target[1], instruction.text)
    inside = list(called.values()) or [instruction]
    opcodes = {each.opcode for each in inside}
    if "convolution" in opcodes or _DIM_LABELS.search(instruction.text):
        backward = "transpose(" in instruction.text
        return ("ConvolutionBackward" if backward else "ConvolutionForward"), None
    if "dot" in opcodes or (target and ("gemm" in target[1] or "cublas" in target[1])):
        return "MatrixMul", None
    if "reduce-window" in opcodes:
        return "PoolingForward", None
    if "select-and-scatter" in opcodes:
        return "PoolingBackward", None
    if "reduce" in opcodes:
        return "Reduce", None
    if target:
        return target[1], None
    if scatter := opcodes & {"scatter", "sort", "while", "conditional"}:
        return _camel(min(scatter)), None
    computing = [each.opcode for each in inside if each.opcode not in _MOVES]
    if not computing:
        moving = [each.opcode for each in inside if each.opcode not in FREE]
        return _camel(moving[-1] if moving else instruction.opcode), None
    if not called and instruction.opcode not in _MODES:
        return _camel(instruction.opcode), None
    return "Elemwise", _elementwise_mode(computing)


def _elementwise_mode(opcodes: list[str]) -> str:
    """The mode in MegEngine's terms if it has one; a maximum next to an addition is a ReLU."""
    if opcodes == ["add", "maximum"]:
        return "FUSE_ADD_RELU"
    return "_".join(_MODES.get(opcode, opcode.upper()) for opcode in dict.fromkeys(opcodes)) + (
        f"_{len(opcodes)}" if len(set(opcodes)) < len(opcodes) else ""
    )


def _mode_of_ours(target: str, text: str) -> str:
    """The operation unless it is a plain forward one, ADD for a residual, and the activation."""
    operation = re.sub(r"^jax_bnar_|_v\d+$", "", target)
    # A call with two normalised inputs always adds them.
    joins_two = operation.startswith("dual_")
    operation = operation.removeprefix("dual_")
    parts = [] if operation in ("forward", "normalise") else [operation.upper()]
    if joins_two or re.search(r"\bhas_z\s*=\s*true", text):
        parts.append("ADD")
    activation, gate = (
        re.search(rf'\b{name}\s*=\s*"(\w+)"', text) for name in ("activation", "gate")
    )
    if activation and "none" not in (activation[1], gate and gate[1]):
        parts.append(activation[1].upper())
    return "_".join(parts) or "PLAIN"


def _computation(instruction: Instruction, entry: Computation, called: Computation) -> int:
    total = 0
    for each, names in _with_operands(instruction, entry, called):
        if each.opcode in ("convolution", "dot") or _DIM_LABELS.search(each.text):
            total += _multiply_adds(each, names)
        elif each.opcode in ("reduce", "reduce-window"):
            arrays = [a for o in each.operands[:1] if o in names for a in names[o].arrays]
            window = _window(each.text)
            total += each.elements * window if window else sum(math.prod(a.shape) for a in arrays)
        elif each.opcode == "custom-call":
            # MegEngine counts one operation fewer than an elementwise operator has operands, for
            # each element.
            total += each.elements * max(len(each.operands) - 1, 1)
        elif each.opcode not in _MOVES and each.opcode not in ("fusion", "call"):
            total += each.elements
    return total


def _with_operands(
    instruction: Instruction, entry: Computation, called: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    if called:
        yield from ((each, called) for each in called.values())
    else:
        yield instruction, entry


def _multiply_adds(instruction: Instruction, names: Computation) -> int:
    """Twice the number of products in a convolution or a matrix product.

    A call of cuDNN returns several arrays, of which the first is the result.
    """
    result = instruction.arrays[0].shape if instruction.arrays else ()
    operands = [names[o].arrays[0].shape for o in instruction.operands[:2] if o in names]
    if len(operands) < 2:
        return 0
    first, second = operands
    labels = _DIM_LABELS.search(instruction.text)
    if labels is None:
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
        contracted = [first[int(d)] for d in dims[1].split(",") if d] if dims else []
        return 2 * math.prod(result) * math.prod(contracted)
    outputs = labels[1].find("o")
    groups = re.search(r"batch_group_count=(\d+)", instruction.text)
    per_output = math.prod(second) // max(second[outputs] if outputs >= 0 else 1, 1)
    return 2 * math.prod(result) * per_output // (int(groups[1]) if groups else 1)


def _window(text: str) -> int:
    size = re.search(r"window=\{size=([\dx]+)", text)
    return math.prod(int(n) for n in size[1].split("x")) if size else 0


def _camel(opcode: str) -> str:
    return "".join(part.capitalize() for part in opcode.split("-"))
