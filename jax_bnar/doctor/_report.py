"""The doctor's report: what it holds, and its text.

Its fields are the keys of the `--json` output.
"""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Literal

# works: the kernels ran, and agree with pure JAX within the bound. wrong: they ran, but disagree.
# failed: there is a device, but a kernel raised an error, crashed or hung. unsupported: the driver
# or the device cannot load the kernels of this build. no_kernels: this build has none for the
# platform. unavailable: JAX has no such device. excluded: JAX_PLATFORMS omits it.
Status = Literal["works", "wrong", "failed", "unsupported", "no_kernels", "unavailable", "excluded"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why something does not work, and how to fix it."""

    reason: str
    way_out: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of the operator, forward and backward, compared with pure JAX.

    Attributes:
        dtype: dtype of x and z.
        layout: "NHWC" or "NCHW".
        agrees: whether every result is within the bound of its dtype.
        largest_error: the largest error as a fraction of the bound; None if it is not finite.
        worst_result: the result with that error: y, mean, var, dx, dz, dscale or dbias.
        error: the exception, if one was raised instead.
    """

    dtype: str
    layout: str
    agrees: bool
    largest_error: float | None = None
    worst_result: str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Examination:
    """The findings on one platform, made by a separate process up to and including `step`.

    `cuda_obstacle` says why the GPUs of the machine cannot load the CUDA kernels, if so. Whichever
    platform is examined, the process asks the driver, since JAX may have no plugin for CUDA.
    """

    step: str = "import"
    platform: str | None = None
    device_kind: str | None = None
    device_count: int | None = None
    runtime_ffi_api_version: tuple[int, int] | None = None
    cases: tuple[Case, ...] = ()
    error: str | None = None
    cuda_obstacle: Problem | None = None
    jax_environment: str | None = None


@dataclasses.dataclass(frozen=True)
class PlatformReport:
    """One platform.

    Attributes:
        status: see `Status`.
        device_kind: the first device's name, or None if JAX has no device.
        device_count: number of local devices.
        kernels: the operations that have a kernel for the platform in this build.
        runtime_ffi_api_version: (major, minor) of the platform's runtime, which accepts handlers
            built for this version or an older one. None if it could not be asked.
        cases: the runs of the operator.
        problems: empty if status is "works".
        log: the end of JAX's standard error, or None if status is "works". The reason why a plugin
            did not start appears only there.
    """

    status: Status
    device_kind: str | None
    device_count: int | None
    kernels: tuple[str, ...]
    runtime_ffi_api_version: tuple[int, int] | None
    cases: tuple[Case, ...]
    problems: tuple[Problem, ...]
    log: str | None


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions of packages and of the driver; None if there is no driver."""

    jax_bnar: str
    jax: str
    jaxlib: str
    numpy: str
    python: str
    cuda_packages: dict[str, str]
    nvidia_driver: str | None


@dataclasses.dataclass(frozen=True)
class Build:
    """The native modules of jax_bnar.

    Attributes:
        native_module: the file of the module with the CPU kernels, or None if it did not load.
        load_error: why it did not load.
        ffi_api_version: (major, minor) of the FFI headers that it was compiled with.
        cuda_module: the file of the module with the CUDA kernels, which is built from the sources
            or comes with the distribution jax-bnar-cuda13; None if there is none.
        cuda_load_error: why it did not load.
        cuda_version: the CUDA version that it was compiled with; None without CUDA kernels.
        cuda_abi: the version of the calls of CUDA kernels in programs that are compiled here, and
            of the kernels; machines must agree on it to exchange programs.
        cuda_architectures: what its CUDA kernels are compiled for: "sm_80" stands for machine code,
            and "PTX for 12.0 and newer" for what the driver compiles on newer GPUs.
    """

    native_module: str | None
    load_error: str | None
    ffi_api_version: tuple[int, int] | None
    cuda_module: str | None
    cuda_load_error: str | None
    cuda_version: str | None
    cuda_abi: int | None
    cuda_architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine and its environment.

    Attributes:
        system: operating system and its version.
        architecture: as printed by `uname -m`.
        cpu_count: number of processors that this process may use.
        cpu_isa: instruction set that the CPU kernels use.
        huge_pages: whether they ask for huge pages for large results.
        gpus: one line for each GPU that nvidia-smi lists.
        nvcc: path of nvcc.
        allocator: the malloc of the process, which matters if results are large.
        environment_variables: variables of JAX, XLA, CUDA and the dynamic linker that are set.
    """

    system: str
    architecture: str
    cpu_count: int | None
    cpu_isa: str | None
    huge_pages: bool | None
    gpus: tuple[str, ...]
    nvcc: str | None
    allocator: str
    environment_variables: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Report:
    """The complete report.

    Attributes:
        works: whether the default platform works with the kernels; if so, the exit code is 0.
        default_platform: JAX's default platform, or None if it could not be determined.
        versions, build, machine: see these classes.
        platforms: reports by name, for "cpu", "cuda", and the default platform if it is another.
        problems: problems that do not concern a single platform.
        jax_environment: the output of `jax.print_environment_info`, or None if there is none.
        jax_environment_platform: the platform on which that was called.
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


_STATUS = {
    "works": "works",
    "wrong": "gives wrong results",
    "failed": "does not work",
    "unsupported": "cannot load the kernels of this build",
    "no_kernels": "has no kernels in this build",
    "unavailable": "not available",
    "excluded": "excluded",
}


def render(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    name = report.default_platform or "unknown"
    verdict = "works" if report.works else "does NOT work"
    version = report.versions.jax_bnar
    yield f"jax_bnar {version}: the default platform ({name}) {verdict} with its kernels"
    yield from _problems(report.problems)
    yield ""
    yield from _environment(report)
    for platform, found in report.platforms.items():
        yield ""
        default = " (default)" if platform == name else ""
        yield f"{platform}{default}: {_STATUS[found.status]}"
        yield from _platform(found)
    yield ""
    if report.jax_environment is None:
        yield "jax.print_environment_info() returned nothing"
        return
    yield f"jax.print_environment_info(), on {report.jax_environment_platform}"
    yield textwrap.indent(report.jax_environment, "  ")


def _environment(report: Report) -> Iterator[str]:
    versions, build, machine = report.versions, report.build, report.machine
    packages = [f"{name} {version}" for name, version in versions.cuda_packages.items()]
    runtimes = [
        f"{_dotted(found.runtime_ffi_api_version)} in the runtime of {platform}"
        for platform, found in report.platforms.items()
        if found.runtime_ffi_api_version is not None
    ]
    rows = {
        "jax": f"{versions.jax}, jaxlib {versions.jaxlib}, numpy {versions.numpy}",
        "CUDA packages": ", ".join(packages) or "none",
        "NVIDIA driver": versions.nvidia_driver or "none",
        "GPUs": "; ".join(machine.gpus) or "none",
        "nvcc": machine.nvcc or "none on PATH",
        "Python": versions.python,
        "system": f"{machine.system}, {machine.cpu_count} CPUs",
        "allocator": machine.allocator,
        "native module": build.native_module or f"none ({build.load_error})",
        "CPU kernels": machine.cpu_isa or "none",
        "huge pages": "requested for large results" if machine.huge_pages else "not requested",
        "CUDA kernels": _cuda_kernels(build),
        "CUDA calls": "none" if build.cuda_abi is None else f"version {build.cuda_abi}",
        "XLA FFI API": "; ".join([f"{_dotted(build.ffi_api_version)} in the build", *runtimes]),
        **machine.environment_variables,
    }
    width = max(map(len, rows)) + 2
    for key, value in rows.items():
        yield f"  {key:{width}}{value}"


def _cuda_kernels(build: Build) -> str:
    if build.cuda_version is None:
        if build.cuda_load_error:
            return f"none ({build.cuda_load_error})"
        elsewhere = "programs for CUDA that are compiled ahead of time need them where they run"
        return "none" if build.cuda_abi is None else f"none; {elsewhere}"
    return f"CUDA {build.cuda_version}, {', '.join(build.cuda_architectures)}, {build.cuda_module}"


def _platform(found: PlatformReport) -> Iterator[str]:
    if found.device_kind is not None:
        yield f"  device      {found.device_kind}, {found.device_count} of them"
    yield f"  kernels     {', '.join(found.kernels) or 'none'}"
    for case in found.cases:
        yield f"  executed    {case.dtype:9} {case.layout}  {_outcome(case)}"
    yield from _problems(found.problems)
    if found.log is not None:
        yield "  log"
        yield textwrap.indent(found.log, "    ")


def _outcome(case: Case) -> str:
    if case.error is not None:
        return "FAILED"
    error = "not finite" if case.largest_error is None else f"{case.largest_error:.2g} of the bound"
    return f"{'ok' if case.agrees else 'WRONG'}, largest error {error} ({case.worst_result})"


def _problems(problems: tuple[Problem, ...]) -> Iterator[str]:
    for problem in problems:
        yield f"  reason      {problem.reason}"
        yield f"    way out   {problem.way_out}"


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))
