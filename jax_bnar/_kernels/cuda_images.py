"""Which CUDA drivers and GPUs can load the images of the kernels in this build, and why not others.

An image is machine code for one GPU architecture, or PTX, which the driver compiles when it loads
it. The rules are those of the CUDA programming guide. Machine code for 8.0 runs on 8.x from 8.0 on,
and on no 9.x. PTX for 12.0 runs on 12.0 and everything newer, if the driver is as new as the
compiler that wrote it. A program compiled by CUDA 13.1 needs a driver for any CUDA 13.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from jax_bnar._kernels.cuda_driver import Device, Version

# The kernels use instructions that older GPUs lack.
OLDEST_CAPABILITY: Final = (8, 0)
# The oldest Linux driver for each CUDA, as NVIDIA's table of release notes has it.
_OLDEST_DRIVER: Final = {12: "525", 13: "580"}


class Obstacle(NamedTuple):
    """Why the kernels cannot be loaded, and the way out."""

    reason: str
    way_out: str


@dataclasses.dataclass(frozen=True)
class CudaBuild:
    """What the CUDA kernels were compiled with and for.

    Attributes:
        toolkit: (major, minor) of the compiler's CUDA.
        architectures: the compute capabilities that it compiled machine code for.
        ptx: the compute capabilities that it wrote PTX for.
    """

    toolkit: Version
    architectures: tuple[Version, ...]
    ptx: tuple[Version, ...]

    @classmethod
    def of(cls, cuda_module: Any) -> "CudaBuild":
        """What the native module says of itself."""
        return cls(
            cuda_module.cuda_version(),
            tuple(divmod(number, 10) for number in cuda_module.cuda_architectures()),
            tuple(divmod(number, 10) for number in cuda_module.cuda_ptx_architectures()),
        )

    def images(self) -> tuple[str, ...]:
        """The images that the build contains: "sm_80", ..., "PTX for 12.0 and newer"."""
        compiled = (f"sm_{major}{minor}" for major, minor in self.architectures)
        return *compiled, *(f"PTX for {_dotted(capability)} and newer" for capability in self.ptx)


def driver_obstacle(build: CudaBuild, supported: Version | None) -> Obstacle | None:
    """Why the driver loads none of the images. `supported` is its CUDA, or None for no driver."""
    if supported is None:
        return Obstacle(
            "no NVIDIA driver was found",
            "if the machine has an NVIDIA GPU, install its driver, or start the container with"
            " access to the GPU (docker run --gpus all)",
        )
    if supported[0] < build.toolkit[0]:
        oldest = _OLDEST_DRIVER.get(build.toolkit[0])
        return Obstacle(
            f"the NVIDIA driver supports CUDA {_dotted(supported)}, but the kernels are compiled"
            f" with CUDA {_dotted(build.toolkit)}",
            f"install a driver for CUDA {build.toolkit[0]}"
            + (f" (version {oldest} or newer)" if oldest else ""),
        )
    return None


def devices_obstacle(
    build: CudaBuild, supported: Version, devices: Iterable[Device]
) -> Obstacle | None:
    """Why a GPU of this process loads none of the images; None if each of them loads one.

    JAX may place a program on any of them, so one that cannot is an obstacle to all.
    """
    given = tuple(devices)
    for device in given:
        obstacle = _device_obstacle(build, supported, device)
        if obstacle is None:
            continue
        if all(_device_obstacle(build, supported, other) for other in given):
            return obstacle
        hide = "hide this GPU with CUDA_VISIBLE_DEVICES"
        return obstacle._replace(way_out=f"{hide}, or {obstacle.way_out}")
    return None


def _device_obstacle(build: CudaBuild, supported: Version, device: Device) -> Obstacle | None:
    capability = device.capability
    compiled = any(
        architecture[0] == capability[0] and architecture <= capability
        for architecture in build.architectures
    )
    has_ptx = any(architecture <= capability for architecture in build.ptx)
    if compiled or (has_ptx and supported >= build.toolkit):
        return None
    gpu = f"{device.name} has compute capability {_dotted(capability)}"
    if capability < OLDEST_CAPABILITY:
        return Obstacle(
            f"{gpu}, and the CUDA kernels need {_dotted(OLDEST_CAPABILITY)} or newer",
            "leave it as it is: on this GPU, the operators run in pure JAX",
        )
    reason = f"{gpu}, and the CUDA kernels of this build are for {', '.join(build.images())}"
    if has_ptx:
        return Obstacle(
            f"{reason}, which a driver for CUDA {_dotted(supported)} cannot compile",
            f"install a driver for CUDA {_dotted(build.toolkit)} or newer",
        )
    return Obstacle(
        reason,
        "build from the source tree on this machine with `pip install . -C"
        " cmake.define.JAX_BNAR_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native`",
    )


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
