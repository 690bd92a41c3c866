"""Renders the report as plain text."""

import textwrap
from collections.abc import Iterator

from jax_bnar.doctor._report import Build, Case, PlatformReport, Problem, Report

_STATUS = {
    "works": "works",
    "wrong": "gives wrong results",
    "failed": "does not work",
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
        "CUDA kernels": _cuda_kernels(build),
        "XLA FFI API": "; ".join([f"{_dotted(build.ffi_api_version)} in the build", *runtimes]),
        **machine.environment_variables,
    }
    width = max(map(len, rows)) + 2
    for key, value in rows.items():
        yield f"  {key:{width}}{value}"


def _cuda_kernels(build: Build) -> str:
    if build.cuda_version is None:
        return f"none ({build.cuda_load_error})" if build.cuda_load_error else "none"
    return f"CUDA {build.cuda_version}, {', '.join(build.cuda_architectures)}, {build.cuda_module}"


def _platform(found: PlatformReport) -> Iterator[str]:
    if found.device_kind is not None:
        yield f"  device      {found.device_kind}, {found.device_count} of them"
    yield f"  registered  {', '.join(found.registered) or 'nothing'}"
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
