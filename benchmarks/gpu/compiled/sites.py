"""What plain Flax moves at each BatchNorm site of ResNet-50, as XLA compiles it for an H200.

python -m benchmarks.gpu.compiled.sites

The model of the kernels (`benchmarks.gpu.model`) takes its row of XLA from these numbers. Forward
and backward of a site are one program, in which XLA may fuse one with the other, as where they are
measured (`benchmarks.gpu.jax_benchmark`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import tyro

from benchmarks.common.json_file import write_json
from benchmarks.common.progress import say
from benchmarks.common.sites import RESNET50_SITES
from benchmarks.gpu.compiled import compiler, targets
from benchmarks.gpu.compiled.count import Kernel, kernels
from benchmarks.gpu.compiled.document import make_document
from benchmarks.gpu.compiled.programs import operator
from benchmarks.gpu.compiled.row import compile_program
from benchmarks.gpu.model.write import CASES
from benchmarks.sites.problem import DType, itemsize

GPU: Final = "h200"
RESULTS: Final = Path(__file__).parents[2] / "results" / "gpu-compiled-sites.json"


def measure_sites(dtype: DType, batch: int) -> list[dict[str, Any]]:
    """For each site the bytes of its kernels, and what of them L2 may still have."""
    mesh = targets.mesh_of(GPU, 1)
    rows = []
    for site in RESNET50_SITES:
        say(f"compiling {site.label}, {dtype}, batch {batch}")
        compiled = compile_program(operator(site, "flax", dtype, batch), mesh)
        found = kernels(compiled.program.as_text() or "")
        large = site.elements(batch) * itemsize(dtype) // 8
        rows.append({"site": site.label, "count": site.count, "kernels": with_reuse(found, large)})
        jax.clear_caches()
    return rows


def with_reuse(found: Sequence[Kernel], large: int) -> list[dict[str, int]]:
    """The `bytes` of each kernel, and those `after` the last kernel that moved a `large` amount.

    These are the bytes that it reads of arrays which that kernel has touched. Kernels in between
    work on vectors, and leave L2 as it is.
    """
    last: Kernel | None = None
    rows = []
    for kernel in found:
        rows.append({"bytes": kernel.nbytes, "after": kernel.after(last) if last else 0})
        if kernel.nbytes >= large:
            last = kernel
    return rows


def cases() -> list[tuple[int, DType]]:
    """The batches and dtypes of which the model's predictions are committed."""
    return list(dict.fromkeys((batch, dtype) for batch, dtype, _ in CASES))


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(write, args=arguments, description=__doc__)


def write(output: Path = RESULTS) -> None:
    """Compiles all sites and writes the document."""
    compiler.prepare()
    document = make_document(runs=[])
    document["runs"] += [
        {"gpu": GPU, "batch": batch, "dtype": dtype, "sites": measure_sites(dtype, batch)}
        for batch, dtype in cases()
    ]
    write_json(output, document)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
