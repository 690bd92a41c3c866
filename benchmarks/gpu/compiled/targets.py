"""The GPUs to compile for, and meshes of them.

A folder has a description of each, a GpuTargetConfigProto in text form, with the numbers that XLA
publishes (xla/backends/gpu/target_config/specs in its sources) and the cuDNN that jax 0.10 asks
for.
"""

from pathlib import Path
from typing import Final, Literal, get_args

import jax
import numpy as np
from jax.experimental import topologies

GpuName = Literal["h200", "h100", "a100", "b200"]
GPUS: Final[tuple[GpuName, ...]] = get_args(GpuName)
TITLES: Final[dict[GpuName, str]] = {"h200": "H200", "h100": "H100", "a100": "A100", "b200": "B200"}
_SPECS: Final = Path(__file__).with_name("specs")
_GPUS_OF_A_HOST: Final = 8


def target_config(gpu: GpuName) -> str:
    """The description of a GPU for XLA."""
    return (_SPECS / f"{gpu}.txtpb").read_text()


def topology(number: int) -> str:
    """Hosts of eight GPUs in one partition, or one host with fewer.

    Raises:
        ValueError: more than eight that are no multiple of eight.
    """
    if number <= _GPUS_OF_A_HOST:
        return f"1x1x{number}"
    hosts, rest = divmod(number, _GPUS_OF_A_HOST)
    if rest:
        raise ValueError(f"{number} GPUs: give at most 8, or a multiple of 8, which is a host.")
    return f"1x{hosts}x{_GPUS_OF_A_HOST}"


def mesh_of(gpu: GpuName, number: int) -> jax.sharding.Mesh:
    """A mesh with the axis "data" of GPUs that can be compiled for and nothing else."""
    found = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology=topology(number)
    )
    return jax.sharding.Mesh(np.array(found.devices), ("data",))
