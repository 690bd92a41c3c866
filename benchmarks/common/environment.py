"""What a result depends on besides the code: processor, versions, allocator, commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import jax_bnar
from benchmarks.common.allocator import describe_allocator
from jax_bnar._kernels import targets

_PACKAGES: Final = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "paddlepaddle",
    "numpy",
)


def core_count() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_environment() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": core_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            "jax_bnar": jax_bnar.__version__,
            **{package: package_version(package) for package in _PACKAGES},
        },
        "allocator": describe_allocator(),
        "jax_bnar_isa": targets.cpu_isa(),
    }


def package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor() or "unknown"
    # A hypervisor may hide the model's name, but not these numbers.
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return ", ".join([fields["model name"], *numbers])


def _commit() -> str | None:
    """The commit of the checkout, followed by "+" if files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
