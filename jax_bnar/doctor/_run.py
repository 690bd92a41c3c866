"""Examines the platforms one after another and assembles the report."""

import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from jax_bnar._base import installation
from jax_bnar._base.implementation import from_environment
from jax_bnar._kernels import targets
from jax_bnar.doctor import _environment, _processes
from jax_bnar.doctor._diagnosis import diagnose
from jax_bnar.doctor._report import Case, Examination, Problem, Report

_UNKNOWN = "unknown"
_ALIASES = {"gpu": "cuda"}


class Examined(NamedTuple):
    """One process's findings, how it failed (None if it succeeded), and its standard error."""

    found: Examination
    trouble: str | None
    log: str = ""


# Takes the value of JAX_PLATFORMS for the examination; None keeps the current value.
Examine = Callable[[str | None], Examined]


def examine_in_process(jax_platforms: str | None, *, timeout: float) -> Examined:
    environment = dict(os.environ)
    if jax_platforms is not None:
        environment["JAX_PLATFORMS"] = jax_platforms
    with tempfile.TemporaryDirectory(prefix="jax_bnar_doctor_") as directory:
        file = pathlib.Path(directory) / "found.json"
        finished = _processes.run(
            [sys.executable, "-m", "jax_bnar.doctor._examination", str(file)],
            timeout=timeout,
            environment=environment,
        )
        found = _read(file)
    return Examined(found, finished.problem, finished.stderr)


def _read(file: pathlib.Path) -> Examination:
    if not file.exists():
        return Examination()
    found = json.loads(file.read_text())
    version = found["runtime_ffi_api_version"]
    found["runtime_ffi_api_version"] = None if version is None else (version[0], version[1])
    found["cases"] = tuple(Case(**case) for case in found["cases"])
    return Examination(**found)


def report(examine: Examine) -> Report:
    versions, machine = _environment.versions_and_machine()
    build = _environment.build()
    asked = [name for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name]
    asked = [_ALIASES.get(name, name) for name in asked]

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

    platforms = {
        name: diagnose(
            name,
            examined[name].found if name in examined else None,
            examined[name].trouble if name in examined else not_examined[name],
            examined[name].log if name in examined else "",
            versions=versions,
            build=build,
            machine=machine,
        )
        for name in (*examined, *not_examined)
    }
    problems = _environment_problems()
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
    try:
        targets.cpu_isa()
    except ValueError as error:
        problems.append(Problem(str(error), "unset JAX_BNAR_CPU_ISA"))
    return tuple(problems)
