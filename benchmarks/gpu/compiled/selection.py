"""Which programs are compiled: a default table, or what options ask for."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.gpu.compiled.programs import BATCHES, NORMS, REMAT, ProgramName, Variant
from benchmarks.gpu.compiled.row import Case
from benchmarks.gpu.compiled.targets import GpuName
from benchmarks.sites.problem import DType

DTypeName = Literal["bf16", "f16", "f32"]
_DTYPES: Final[dict[DTypeName, DType]] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
}


@dataclass(frozen=True)
class Selection:
    """Every combination of these is a case.

    Attributes:
        batch: images on each device; None for that of the program.
    """

    gpu: tuple[GpuName, ...] = ("h200",)
    program: tuple[ProgramName, ...] = ("step",)
    variant: tuple[Variant, ...] = ("ours", "flax")
    dtype: tuple[DTypeName, ...] = ("bf16",)
    devices: tuple[int, ...] = (1,)
    batch: int | None = None

    def cases(self) -> Iterator[Case]:
        for gpu, program, dtype, devices, variant in itertools.product(
            self.gpu, self.program, self.dtype, self.devices, self.variant
        ):
            batch = BATCHES[program] if self.batch is None else self.batch
            yield Case(gpu, program, variant, _DTYPES[dtype], devices, batch)


_WITHOUT_MASK: Final[tuple[Variant, ...]] = ("ours", "ours_xla", "fuse", "flax")
# What everybody asks: all forms on one H200, then each of the other questions with ours and plain
# Flax alone. A step takes 10 to 20 s on 2 quiet cores, and an operator 1 or 2.
DEFAULT: Final = (
    Selection(variant=(*NORMS, *REMAT)),
    Selection(dtype=("f16", "f32")),
    Selection(dtype=("f32",), variant=("ours_xla", *REMAT)),
    Selection(gpu=("h100", "a100", "b200")),
    Selection(gpu=("a100",), dtype=("f32",), variant=("ours", "ours_mask", "flax")),
    Selection(devices=(8, 64, 1024)),
    Selection(program=("evaluation",), variant=_WITHOUT_MASK),
    Selection(program=("block",), variant=NORMS),
    Selection(program=("operator",), variant=NORMS),
    Selection(program=("operator",), dtype=("f16", "f32")),
    Selection(program=("silu",), variant=_WITHOUT_MASK),
    Selection(program=("silu",), dtype=("f16", "f32")),
    Selection(program=("frozen",), dtype=("bf16", "f32")),
    Selection(program=("volumes",), dtype=("bf16", "f32")),
)


def default_cases() -> list[Case]:
    return [case for selection in DEFAULT for case in selection.cases()]
