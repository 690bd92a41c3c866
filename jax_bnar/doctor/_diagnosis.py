"""Turns findings into a diagnosis: what is wrong on each platform, and how to fix it."""

from jax_bnar._base import installation
from jax_bnar._base.native_module import CUDA_DISTRIBUTION
from jax_bnar._kernels import targets
from jax_bnar.doctor import _environment
from jax_bnar.doctor._report import (
    Build,
    Examination,
    Machine,
    PlatformReport,
    Problem,
    Status,
    Versions,
)

# Long enough for a plugin's traceback.
_LOG_CHARACTERS = 4000
_OUR_KERNELS_OFF = "until it is fixed, JAX_BNAR_IMPLEMENTATION=xla computes in pure JAX"
_ASK = f"please open an issue with this report; {_OUR_KERNELS_OFF}"
_JAX_ALONE = (
    "JAX itself cannot start the device: make `python -c 'import jax; print(jax.devices())'` work"
    " first"
)


def registered(platform: str) -> tuple[str, ...]:
    return tuple(sorted(name for name, of in targets.registered if of == platform))


def diagnose(
    platform: str,
    examination: Examination | None,
    trouble: str | None,
    log: str,
    *,
    versions: Versions,
    build: Build,
    machine: Machine,
) -> PlatformReport:
    """The report of one platform.

    `examination` is None if the platform was not examined. `trouble` says how the examining process
    failed, or why there was none; None means success. `log` is the process's standard error.
    """
    found = examination or Examination()
    problems: list[Problem] = []
    status: Status
    if examination is None and trouble is not None:
        status = "excluded"
        problems.append(Problem(trouble, "unset JAX_PLATFORMS to examine it"))
    elif found.device_kind is None:
        status = "unavailable"
        problems += _no_device(platform, found, trouble, versions, machine)
    else:
        status = "works"
    operations = registered(platform)
    if not {"forward", "backward"} <= set(operations):
        status = "no_kernels" if status == "works" else status
        problems.append(_no_kernels(platform, versions, machine))
    elif status == "works":
        status, more = _executed(found, trouble, build)
        problems += more
    return PlatformReport(
        status=status,
        device_kind=found.device_kind,
        device_count=found.device_count,
        registered=operations,
        runtime_ffi_api_version=found.runtime_ffi_api_version,
        cases=found.cases,
        problems=tuple(problems),
        log=None if status == "works" else log[-_LOG_CHARACTERS:].strip() or None,
    )


def _no_device(
    platform: str,
    found: Examination,
    trouble: str | None,
    versions: Versions,
    machine: Machine,
) -> list[Problem]:
    problems = []
    if platform == "cuda":
        if not machine.gpus and versions.nvidia_driver is None:
            problems.append(
                Problem(
                    "no NVIDIA driver was found (nvidia-smi, /proc/driver/nvidia/version)",
                    "if the machine has an NVIDIA GPU, install its driver, or start the container"
                    " with access to the GPU (docker run --gpus all)",
                )
            )
        if not _environment.has_cuda_plugin(versions):
            problems.append(
                Problem(
                    "JAX has no CUDA plugin",
                    "pip install 'jax[cuda13]', or 'jax[cuda12]' for a driver older than 580",
                )
            )
    if found.error is not None:
        problems.append(Problem(f"JAX found no device: {found.error}", _JAX_ALONE))
    elif trouble is not None:
        problems.append(Problem(f"JAX found no device: {trouble} (step: {found.step})", _JAX_ALONE))
    return problems


def _no_kernels(platform: str, versions: Versions, machine: Machine) -> Problem:
    if targets.load_error is not None and platform != "cuda":
        return Problem(*installation.why_no_native_module(targets.load_error))
    if targets.cuda_load_error is not None and platform == "cuda":
        return Problem(*installation.why_no_cuda_module(targets.cuda_load_error))
    reason = targets.why_no_kernel("forward")
    if platform != "cuda":
        return Problem(reason, "nothing to do: without kernels, the operators run in pure JAX")
    nvcc = "" if machine.nvcc else "install nvcc of CUDA 13 (none is on PATH), then "
    return Problem(
        reason,
        f"install {CUDA_DISTRIBUTION} {versions.jax_bnar}, or {nvcc}reinstall from the source tree"
        " with `pip install . -C cmake.define.JAX_BNAR_CUDA=ON`, which reports anything that is"
        " missing",
    )


def _executed(
    found: Examination, trouble: str | None, build: Build
) -> tuple[Status, list[Problem]]:
    problems = []
    runtime = found.runtime_ffi_api_version
    if build.ffi_api_version and runtime and build.ffi_api_version > runtime:
        problems.append(
            Problem(
                f"the kernels are built for FFI API {_dotted(build.ffi_api_version)}, but the"
                f" runtime has {_dotted(runtime)} and refuses newer versions",
                "reinstall jax_bnar with `pip install .`, which builds against the oldest supported"
                " jaxlib, or upgrade jaxlib and its plugin",
            )
        )
    raised = [case for case in found.cases if case.error is not None]
    for error in dict.fromkeys(case.error for case in raised):
        where = ", ".join(f"{c.dtype} {c.layout}" for c in raised if c.error == error)
        problems.append(Problem(f"{where}: {error}", _ASK))
    # A failure after the last case affects only the text of jax.print_environment_info.
    if trouble is not None and found.step.startswith("operator"):
        problems.append(Problem(f"{trouble} (step: {found.step})", _ASK))
    elif not found.cases:
        problems.append(Problem(f"{trouble or 'nothing was executed'} (step: {found.step})", _ASK))
    if problems:
        return "failed", problems
    wrong = [case for case in found.cases if not case.agrees]
    problems = [
        Problem(
            f"{case.dtype} {case.layout}: {case.worst_result} differs from pure JAX by"
            f" {_times(case.largest_error)} its bound",
            _ASK,
        )
        for case in wrong
    ]
    return ("wrong" if wrong else "works"), problems


def _times(error: float | None) -> str:
    return "an infinite or NaN multiple of" if error is None else f"{error:.3g} times"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
