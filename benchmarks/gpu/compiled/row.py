"""Compiles a program for GPUs and counts what it would run there."""

from collections import Counter
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common.hlo_text import layout_changes
from benchmarks.gpu.compiled import targets
from benchmarks.gpu.compiled.count import KINDS, kernels
from benchmarks.gpu.compiled.programs import Program, ProgramName, Variant, build
from benchmarks.sharding.hlo_collectives import compiled_collectives
from benchmarks.sites.problem import DType
from jax_bnar._benchmark.memory import planned_memory


@dataclass(frozen=True)
class Case:
    """What is compiled: `batch` is the number of images on each of `devices`."""

    gpu: targets.GpuName
    program: ProgramName
    variant: Variant
    dtype: DType
    devices: int
    batch: int

    def __str__(self) -> str:
        return (
            f"{self.program}, {self.variant}, {self.dtype}, batch {self.batch},"
            f" {self.devices} x {targets.TITLES[self.gpu]}"
        )


@dataclass(frozen=True)
class Compiled:
    """A compiled program, and the seconds that it took to lower and to compile."""

    program: jax.stages.Compiled
    lower_s: float
    compile_s: float


def compile_program(program: Program, mesh: jax.sharding.Mesh) -> Compiled:
    """Compiles for a mesh, of which every device has an equal part of the images."""
    jitted = jax.jit(program.function, donate_argnums=0 if program.donated else ())
    start = perf_counter()
    lowered = jitted.lower(
        _on(NamedSharding(mesh, PartitionSpec()), program.whole),
        _on(NamedSharding(mesh, PartitionSpec("data")), program.divided),
    )
    middle = perf_counter()
    compiled = lowered.compile()
    return Compiled(compiled, middle - start, perf_counter() - middle)


def _on(sharding: NamedSharding, shapes: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def measure(case: Case) -> dict[str, Any]:
    """The row of a case: counts and bytes are those of one device."""
    program = build(case.program, case.variant, case.dtype, case.batch, case.devices)
    compiled = compile_program(program, targets.mesh_of(case.gpu, case.devices))
    return {
        **asdict(case),
        **count(program, compiled.program),
        "lower_s": round(compiled.lower_s, 2),
        "compile_s": round(compiled.compile_s, 2),
    }


def count(program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What a compiled program launches, moves, sends and occupies."""
    text = compiled.as_text() or ""
    found = kernels(text)
    launches: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for kernel in found:
        launches[kernel.kind] += kernel.times
        moved[kernel.kind] += kernel.times * kernel.nbytes
        if kernel.kind == "ours":
            calls[kernel.target] += kernel.times
    memory = planned_memory(compiled)
    assert memory is not None
    return {
        "kernels": {kind: launches[kind] for kind in KINDS},
        "bytes": {kind: moved[kind] for kind in KINDS},
        "bytes_outside_convolutions": moved.total() - moved["convolution"],
        "calls": dict(calls),
        "activation_copies": len(
            layout_changes(text, program.least_activation, program.weight_sizes())
        ),
        "collectives": _collectives(compiled),
        "peak_bytes": memory.peak,
        "temporary_bytes": memory.temporary,
    }


def _collectives(compiled: jax.stages.Compiled) -> dict[str, dict[str, int]]:
    """For each kind: how many operations, of how many arrays, and the bytes of their results."""
    found: dict[str, Counter[str]] = {}
    for operation in compiled_collectives(compiled):
        counter = found.setdefault(operation[0].opcode, Counter())
        counter["operations"] += 1
        counter["arrays"] += len(operation)
        counter["bytes"] += sum(array.nbytes for array in operation)
    return {opcode: dict(counter) for opcode, counter in found.items()}
