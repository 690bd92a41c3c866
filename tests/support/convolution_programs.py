"""Programs of convolutions, compiled for GPUs that are not there (`compiled_programs`)."""

import itertools
import re
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu.compiled import targets
from benchmarks.gpu.compiled.programs import Variant, convolutions, convolve
from benchmarks.gpu.compiled.row import compile_program, count
from benchmarks.gpu.compiled.targets import GPUS, GpuName
from benchmarks.sites.problem import DType

_CHANNELS: Final = 64
_DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
# By the number of spatial axes.
_SHAPES: Final = {
    1: (16, 1024, _CHANNELS),
    2: (16, 32, 32, _CHANNELS),
    3: (16, 8, 16, 8, _CHANNELS),
}


def convolution_layouts() -> list[dict[str, Any]]:
    """Where the channels of each GPU's convolutions are, by dtype and number of spatial axes."""
    return [
        _layout_of(gpu, dtype, axes)
        for gpu, dtype, axes in itertools.product(GPUS, _DTYPES, _SHAPES)
    ]


def _layout_of(gpu: GpuName, dtype: str, axes: int) -> dict[str, Any]:
    mesh = targets.mesh_of(gpu, 1)
    sharding = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct(_SHAPES[axes], dtype, sharding=sharding)
    kernel = jax.ShapeDtypeStruct((3,) * axes + (_CHANNELS,) * 2, dtype, sharding=sharding)
    text = jax.jit(convolve).lower(x, kernel).compile().as_text() or ""
    (result,) = set(re.findall(r"dim_labels=\w+->b(\w+)", text))
    return {
        "gpu": gpu,
        "capability": mesh.devices.flat[0].compute_capability,
        "dtype": dtype,
        "axes": axes,
        "channels_first": result.startswith("f"),
    }


def among_convolutions() -> dict[str, list[dict[str, Any]]]:
    """What a block of plain Flax copies and moves, and then what it does when it is fused."""
    cases: list[tuple[GpuName, DType, int, int, int]] = [
        ("a100", "float32", 2, -1, 1),
        ("a100", "float32", 2, -1, 8),
        ("a100", "float32", 2, 1, 1),
        ("a100", "bfloat16", 1, -1, 1),
        ("a100", "bfloat16", 2, -1, 1),
        ("h200", "bfloat16", 2, 1, 1),
        ("h200", "float32", 2, 1, 8),
        ("h200", "bfloat16", 3, -1, 1),
        ("h200", "float32", 3, -1, 8),
        ("h200", "bfloat16", 3, 1, 1),
    ]
    return {
        f"{gpu}, {dtype}, {axes} spatial axes, channel axis {channel_axis}, {devices} devices": [
            _block(variant, gpu, dtype, axes, channel_axis, devices) for variant in ("flax", "fuse")
        ]
        for gpu, dtype, axes, channel_axis, devices in cases
    }


def _block(
    variant: Variant, gpu: GpuName, dtype: DType, axes: int, channel_axis: int, devices: int
) -> dict[str, Any]:
    batch, *spatial, _ = _SHAPES[axes]
    program = convolutions(
        tuple(spatial), variant, dtype, batch, devices, channel_axis=channel_axis
    )
    found = count(program, compile_program(program, targets.mesh_of(gpu, devices)).program)
    return {"copies": found["activation_copies"], "bytes": found["bytes_outside_convolutions"]}
