"""Shared by the tests on a GPU: shapes for every strategy, flags, and the check of a case.

With JAX_BNAR_GPU_PLATFORM=cpu this is a dry run: the same code on the CPU, with tiny shapes.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator

import jax
import oracle
import pytest
from cases import FORMS, Case, Cotangents, Operands, cotangents, operands, run
from outcomes import check_gradients, check_results, expected_results

from benchmarks.common.cuda_settings import cuda_settings
from benchmarks.gpu.launches import launched as launched
from jax_bnar._kernels import targets

DRY_RUN = os.environ.get("JAX_BNAR_GPU_PLATFORM") == "cpu"
PLATFORM = "cpu" if DRY_RUN else "gpu"
# A dry run may also have the CUDA kernels, in the emulation.
CUDA_KERNELS = not DRY_RUN or targets.cpu_isa() == "emulation of CUDA"
STRATEGIES = ("auto", "on_chip", "cluster", "two_kernels")
only_on_gpu = pytest.mark.skipif(DRY_RUN, reason="the dry run on the CPU cannot test this")

Shapes = dict[str, tuple[tuple[int, ...], int]]

# These have one slab for all blocks of the device, many slabs of few rows, slabs of which the last
# is not full, and channels and planes that are not multiples of a vector.
_SHAPES: Shapes = {
    "nhwc-56": ((32, 56, 56, 64), -1),
    "nhwc-28": ((8, 28, 28, 128), -1),
    "nhwc-7": ((16, 7, 7, 2048), -1),
    "nhwc-partial-slab": ((9, 13, 13, 200), -1),
    "nhwc-odd": ((3, 5, 7, 65), -1),
    "rows-8": ((4099, 8), -1),
    "rows-3": ((50_003, 3), -1),
    "nchw-56": ((32, 64, 56, 56), 1),
    "nchw-28": ((8, 128, 28, 28), 1),
    "nchw-7": ((16, 512, 7, 7), 1),
    "nchw-odd": ((3, 65, 5, 7), 1),
}
_TINY_SHAPES: Shapes = {
    "nhwc-72": ((4, 5, 5, 72), -1),
    "nhwc-192": ((3, 3, 3, 192), -1),
    "nhwc-odd": ((3, 5, 7, 17), -1),
    "nchw-8": ((3, 5, 8, 8), 1),
}
SHAPES = _TINY_SHAPES if DRY_RUN else _SHAPES
LARGEST = next(iter(SHAPES))
WIDEST = max(SHAPES, key=lambda name: SHAPES[name][0][SHAPES[name][1]])  # by its channels

# Long double is slow on the host, and float64 uses the same path for all shapes.
_MOST_ELEMENTS_OF_FLOAT64 = 200_000


def size(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def shape_cases() -> Iterator[tuple[str, Case]]:
    """Every shape in every dtype, alternating between both values of `save`."""
    dtypes = ("bfloat16", "float32", "float16", "float64")
    for (index, dtype), (name, (shape, axis)) in itertools.product(
        enumerate(dtypes), SHAPES.items()
    ):
        if dtype != "float64" or size(shape) <= _MOST_ELEMENTS_OF_FLOAT64:
            save = ("y", "mask")[(index + len(name)) % 2]
            yield f"{name}-{dtype}-{save}", Case(shape, axis, dtype, save=save)
    # With two inputs the arrays are small, because the oracle takes twice as long.
    shapes = {"nhwc-200": ((5, 9, 9, 200), -1), "nchw-24": ((4, 24, 16, 16), 1)}
    shapes |= {name: at for name, at in SHAPES.items() if size(at[0]) <= 200_000}
    for dtype, save, (name, (shape, axis)) in itertools.product(
        dtypes, ("y", "mask"), (_TINY_SHAPES if DRY_RUN else shapes).items()
    ):
        case = Case(shape, axis, dtype, "dual_bn_add_relu", save=save)
        yield f"two-{name}-{dtype}-{save}", case


def flag_cases() -> Iterator[tuple[str, Case]]:
    """Every combination of form, `save`, parameters and groups, in both layouts."""
    combinations = itertools.product(
        FORMS,
        ("y", "mask"),
        (("float32", "float32"), (None, None), ("bfloat16", None), (None, "float64")),
        (1, 3),
        (-1, 1),
        ("bfloat16", "float32"),
    )
    for index, (form, save, parameters, num_groups, axis, dtype) in enumerate(combinations):
        if (form in ("batch_norm", "bn_relu") and save == "mask") or (DRY_RUN and index % 29):
            continue
        shape = (6, 5, 8, 72) if axis == -1 else (6, 72, 5, 8)
        names = "+".join(name or "none" for name in parameters)
        layout = "nhwc" if axis == -1 else "nchw"
        yield (
            f"{form}-{save}-{names}-groups{num_groups}-{layout}-{dtype}",
            Case(
                shape,
                axis,
                dtype,
                form,
                scale_dtype=parameters[0],
                bias_dtype=parameters[1],
                num_groups=num_groups,
                save=save,
            ),
        )


def strategy(name: str) -> contextlib.AbstractContextManager[None]:
    assert name in STRATEGIES, name
    return cuda_settings(JAX_BNAR_CUDA_STRATEGY=name)


@functools.lru_cache(maxsize=1)
def _prepare(case: Case) -> tuple[Operands, Cotangents, oracle.Forward]:
    """Operands and expectations, cached because the oracle takes longer than the kernels."""
    given = operands(case)
    return given, cotangents(case), expected_results(case, given)


def check(case: Case) -> None:
    """Compares results and gradients of one call of the kernels with the oracle."""
    assert jax.default_backend() == PLATFORM, "JAX does not run on the platform to be tested"
    given, dout, expected = _prepare(case)
    got = run(case, "ffi", given, dout)
    check_results(case, got.y, got.mean, got.var, expected)
    check_gradients(case, given, dout, got)


def check_strategy(kernels: set[str], case: Case, name: str) -> None:
    """Asserts that the launched kernels are those of the requested strategy.

    If the device has no room for a strategy, another one replaces it and the results are still
    right; this would go unnoticed otherwise.
    """
    # float64 and two inputs have only one path.
    simple = name == "two_kernels" or case.dtype == "float64" or case.inputs == 2
    # If threads handle single elements, another kernel packs the mask's bits afterwards.
    kernels = kernels - {"PackMask two_kernels"}
    # NormaliseFlat is for planes that are not multiples of a vector.
    kernels = {name.replace("NormaliseFlat", "Normalise") for name in kernels}
    if simple:
        halves = ("Statistics", "Normalise", "BackwardReduce", "BackwardApply")
        prefix = "Dual" if case.inputs == 2 else ""
        assert kernels == {f"{prefix}{kernel} two_kernels" for kernel in halves}
    elif name == "auto":
        assert {kernel.split()[0] for kernel in kernels} >= {"Forward", "Backward"}
    elif name != "cluster" or has_clusters():
        assert kernels == {f"Forward {name}", f"Backward {name}"}


def has_clusters() -> bool:
    """Thread block clusters need compute capability 9.0; the emulated device has them."""
    return float(getattr(jax.devices()[0], "compute_capability", 9)) >= 9


def calls_outside_graphs(thunks: str) -> list[str]:
    """Custom calls outside the command buffers, according to XLA's dump of what it executes.

    The dump has one line per thunk; those in a command buffer follow it with more indentation.
    """
    outside, buffer_indent = [], None
    for line in thunks.splitlines():
        indent = len(line) - len(line.lstrip())
        if buffer_indent is not None and indent <= buffer_indent:
            buffer_indent = None
        if buffer_indent is None and "kCustomCall" in line:
            outside.append(line)
        if buffer_indent is None and "kCommandBuffer" in line:
            buffer_indent = indent
    return outside
