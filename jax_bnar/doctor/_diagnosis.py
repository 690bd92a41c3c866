"""Has the platforms examined one after another, and says what is wrong on each and what to do."""

import os
from collections.abc import Callable, Sequence

from jax_bnar._base import installation
from jax_bnar._base.implementation import from_environment
from jax_bnar._base.native_module import CUDA_DISTRIBUTION
from jax_bnar._kernels import cuda_driver, targets
from jax_bnar.doctor import _environment
from jax_bnar.doctor._examination import Examined
from jax_bnar.doctor._report import (
    Build,
    Examination,
    Machine,
    PlatformReport,
    Problem,
    Report,
    Status,
    Versions,
)

_UNKNOWN = "unknown"
# Takes the value of JAX_PLATFORMS for the examination; None keeps the current value.
Examine = Callable[[str | None], Examined]
# Long enough for a plugin's traceback.
_LOG_CHARACTERS = 4000
_OUR_KERNELS_OFF = "until it is fixed, JAX_BNAR_IMPLEMENTATION=xla computes in pure JAX"
_ASK = f"please open an issue with this report; {_OUR_KERNELS_OFF}"
_JAX_ALONE = (
    "JAX itself cannot start the device: make `python -c 'import jax; print(jax.devices())'` work"
    " first"
)


def report(examine: Examine) -> Report:
    versions, machine = _environment.versions_and_machine()
    build = _environment.build()
    asked = [name for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name]
    asked = [targets.mlir_platform(name) for name in asked]

    default = examine(None)
    # If the backend did not start, the requested name is the only one known.
    default_name = default.found.platform or next(iter(asked), _UNKNOWN)
    examined: dict[str, Examined] = {default_name: default}
    not_examined: dict[str, str | None] = {}
    for name in ("cpu", "cuda"):
        if name in examined:
            continue
        if name == "cuda" and not _environment.has_cuda_plugin(versions):
            not_examined[name] = None
        elif name == "cuda" and asked and name not in asked:
            not_examined[name] = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} excludes it"
        else:
            examined[name] = examine(name)

    problems = _environment_problems()
    cuda_obstacle = _cuda_obstacle([one.found for one in examined.values()])
    platforms = {
        name: diagnose(
            name,
            examined[name].found if name in examined else None,
            examined[name].trouble if name in examined else not_examined[name],
            examined[name].log if name in examined else "",
            versions=versions,
            build=build,
            machine=machine,
            obstacle=cuda_obstacle if name == "cuda" else None,
            known=problems,
        )
        for name in (*examined, *not_examined)
    }
    texts = {
        name: one.found.jax_environment
        for name, one in examined.items()
        if one.found.jax_environment
    }
    text_platform = next(iter(texts), None)
    return Report(
        works=platforms[default_name].status == "works" and not problems,
        default_platform=None if default_name == _UNKNOWN else default_name,
        versions=versions,
        build=build,
        machine=machine,
        platforms=platforms,
        problems=problems,
        jax_environment=None if text_platform is None else texts[text_platform],
        jax_environment_platform=text_platform,
    )


def _cuda_obstacle(found: Sequence[Examination]) -> Problem | None:
    """Why this machine cannot load the CUDA kernels, as one of the examining processes was told."""
    for examination in found:
        if examination.cuda_obstacle is not None:
            return examination.cuda_obstacle
    # A driver that is too old shows no device, or JAX does not start with it.
    obstacle = targets.driver_obstacle()
    if obstacle is None or cuda_driver.supported_cuda() is None:
        return None
    return Problem(*obstacle)


def _environment_problems() -> tuple[Problem, ...]:
    """Problems that keep the operators from using working kernels, whatever the platform."""
    problems = []
    if targets.cuda_load_error is not None:
        problems.append(Problem(*installation.why_no_cuda_module(targets.cuda_load_error)))
    way_out = "unset JAX_BNAR_IMPLEMENTATION"
    try:
        if from_environment("jax_bnar") == "xla":
            reason = "JAX_BNAR_IMPLEMENTATION=xla turns the kernels off"
            problems.append(Problem(reason, f"{way_out} to use them"))
    except ValueError as error:
        problems.append(Problem(str(error), way_out))
    settings: dict[str, Callable[[], object]] = {
        "JAX_BNAR_CPU_ISA": targets.cpu_isa,
        "JAX_BNAR_HUGE_PAGES": targets.huge_pages,
    }
    for variable, setting in settings.items():
        try:
            setting()
        except ValueError as error:
            problems.append(Problem(str(error), f"unset {variable}"))
    return tuple(problems)


def diagnose(
    platform: str,
    examination: Examination | None,
    trouble: str | None,
    log: str,
    *,
    versions: Versions,
    build: Build,
    machine: Machine,
    obstacle: Problem | None = None,
    known: Sequence[Problem] = (),
) -> PlatformReport:
    """The report of one platform.

    `examination` is None if the platform was not examined. `trouble` says how the examining process
    failed, or why there was none; None means success. `log` is the process's standard error.
    `obstacle` says why this machine cannot load the kernels of the build, if so. `known` are the
    problems of the environment, which the operators raise as well.
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
    operations = tuple(sorted(name for name, of in targets.kernels if of == platform))
    if not {"forward", "backward"} <= set(operations):
        status = "no_kernels" if status == "works" else status
        problems.append(_no_kernels(platform, versions, machine))
    elif obstacle is not None:
        status = "unsupported" if status == "works" else status
        problems.append(obstacle)
    elif status == "works":
        status, more = _executed(found, trouble, build, known)
        problems += more
    return PlatformReport(
        status=status,
        device_kind=found.device_kind,
        device_count=found.device_count,
        kernels=operations,
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
        f"{nvcc}reinstall from the source tree with `pip install . -C"
        " cmake.define.JAX_BNAR_CUDA=ON`, which reports anything that is missing, or install the"
        f" wheel of {CUDA_DISTRIBUTION} {versions.jax_bnar} that `make dist` builds there",
    )


def _executed(
    found: Examination, trouble: str | None, build: Build, known: Sequence[Problem]
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
        ways_out = (problem.way_out for problem in known if error and problem.reason in error)
        problems.append(Problem(f"{where}: {error}", next(ways_out, _ASK)))
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
