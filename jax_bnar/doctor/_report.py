"""What the doctor reports; the fields are the keys of `--json`."""

import dataclasses
from typing import Literal

# works: executed, and equal to pure JAX within the bound. wrong: executed, and not equal.
# failed: the device is there, but a kernel raised, crashed or hung. no_kernels: this build has none
# for the platform. unavailable: JAX has no such device. excluded: JAX_PLATFORMS leaves it out.
Status = Literal["works", "wrong", "failed", "no_kernels", "unavailable", "excluded"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why something does not work, and the way out."""

    reason: str
    way_out: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator executed, forward and backward, next to pure JAX.

    Attributes:
        dtype: of x and z.
        layout: "NHWC" or "NCHW".
        agrees: every result lies within the bound of its dtype.
        largest_error: the largest error, as a fraction of the bound; None where it is no number.
        worst_result: the result that has it: y, mean, var, dx, dz, dscale or dbias.
        error: what was raised instead.
    """

    dtype: str
    layout: str
    agrees: bool
    largest_error: float | None = None
    worst_result: str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Examination:
    """What was found on one platform, in a process of its own, up to and including `step`."""

    step: str = "import"
    platform: str | None = None
    device_kind: str | None = None
    device_count: int | None = None
    runtime_ffi_api_version: tuple[int, int] | None = None
    cases: tuple[Case, ...] = ()
    error: str | None = None
    jax_environment: str | None = None


@dataclasses.dataclass(frozen=True)
class PlatformReport:
    """One platform.

    Attributes:
        status: see `Status`.
        device_kind: the first device's name, None where JAX has no device.
        device_count: local devices.
        registered: operations that have a kernel for the platform in this build.
        runtime_ffi_api_version: (major, minor) that the platform's runtime speaks; it takes
            handlers built for this version or an older one. None where it was not asked.
        cases: what was executed.
        problems: empty where status is "works".
        log: the end of what JAX said on standard error, None where status is "works". Why a plugin
            did not start stands only there.
    """

    status: Status
    device_kind: str | None
    device_count: int | None
    registered: tuple[str, ...]
    runtime_ffi_api_version: tuple[int, int] | None
    cases: tuple[Case, ...]
    problems: tuple[Problem, ...]
    log: str | None


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions of packages and of the driver; None for what is not there."""

    jax_bnar: str
    jax: str
    jaxlib: str
    numpy: str
    python: str
    cuda_packages: dict[str, str]
    nvidia_driver: str | None


@dataclasses.dataclass(frozen=True)
class Build:
    """The native module of jax_bnar.

    Attributes:
        native_module: its file, None where it did not load.
        load_error: why it did not load.
        ffi_api_version: (major, minor) of the headers that it was compiled with.
        cuda_version: CUDA that it was compiled with, None for a build without CUDA kernels.
        cuda_architectures: what its CUDA kernels are compiled for, "sm_80" and so on.
    """

    native_module: str | None
    load_error: str | None
    ffi_api_version: tuple[int, int] | None
    cuda_version: str | None
    cuda_architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where this runs.

    Attributes:
        system: operating system and its version.
        architecture: as `uname -m` says.
        cpu_count: processors that this process may use.
        cpu_isa: instruction set that the CPU kernels run with.
        gpus: one line for each GPU that nvidia-smi lists.
        nvcc: where nvcc was found.
        environment_variables: those of JAX, XLA, CUDA and the dynamic linker that are set.
    """

    system: str
    architecture: str
    cpu_count: int | None
    cpu_isa: str | None
    gpus: tuple[str, ...]
    nvcc: str | None
    environment_variables: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        works: the default platform works with the kernels; the exit code is 0 exactly then.
        default_platform: what JAX computes on by default, None where it did not say.
        versions, build, machine: see there.
        platforms: by name; "cpu", "cuda", and the default platform where that is another one.
        problems: those that concern no single platform.
        jax_environment: what `jax.print_environment_info` says, None where it says nothing.
        jax_environment_platform: the platform on which it was asked.
    """

    works: bool
    default_platform: str | None
    versions: Versions
    build: Build
    machine: Machine
    platforms: dict[str, PlatformReport]
    problems: tuple[Problem, ...]
    jax_environment: str | None
    jax_environment_platform: str | None
