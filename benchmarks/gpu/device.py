"""Describes the device, its driver and the versions, on which results depend as on the code."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax

from benchmarks.common.environment import describe_environment, package_version
from benchmarks.common.json_file import write_json
from jax_bnar._kernels import targets

_PACKAGES: Final = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "triton", "pytest")
_QUERY: Final = (
    "name", "driver_version", "memory.total", "compute_cap", "clocks.sm", "clocks.mem",
    "clocks.max.sm", "power.limit", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip


def describe_device() -> dict[str, Any]:
    environment = describe_environment()
    versions = environment["versions"] | {name: package_version(name) for name in _PACKAGES}
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "nvidia_smi": _nvidia_smi(),
        "kernels": sorted(name for name, of in targets.kernels if of == "cuda"),
        "why_no_kernels": None
        if targets.has_kernel("forward", "cuda")
        else targets.why_no_kernel("forward", ["cuda"]),
        "native_module": getattr(targets.cuda or targets.native, "__file__", None),
        "environment": environment | {"versions": versions},
    }


def _nvidia_smi() -> list[dict[str, str]] | str:
    """Returns an object for each GPU, or the reason why there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = [line.split(", ") for line in finished.stdout.splitlines() if line.strip()]
    return [dict(zip(_QUERY, line, strict=True)) for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    document = describe_device()
    write_json(options.output, document)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
