"""Runs the benchmark on recycled memory (jemalloc preloaded), then on the default allocator.

python -m benchmarks.sites.launch [--allocators jemalloc default] -- OPTIONS OF benchmarks.sites.run

With `--output results/NAME.json` among the options, the results are written to
results/NAME-jemalloc.json and results/NAME-default.json.
"""

import argparse
import ctypes.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.common.allocator import configures_malloc

# Never return freed pages to the system, so that outputs land on pages that were touched before.
MALLOC_CONF: Final = "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,oversize_threshold:0,narenas:1"
ALLOCATORS: Final = ("jemalloc", "default")

_MISSING: Final = (
    "libjemalloc was not found. Install it (Debian, Ubuntu: apt install libjemalloc2; Fedora: dnf"
    " install jemalloc; Arch: pacman -S jemalloc; conda: conda install -c conda-forge jemalloc), or"
    " measure only the default allocator with --allocators default."
)


def find_jemalloc() -> str | None:
    """A name or path of libjemalloc that LD_PRELOAD accepts, or None if it is not installed."""
    in_environment = sorted(Path(sys.prefix, "lib").glob("libjemalloc.so.*"))
    if in_environment:
        return str(in_environment[0])
    return ctypes.util.find_library("jemalloc")


def environment_for(
    allocator: str, environment: Mapping[str, str], jemalloc: str | None
) -> dict[str, str]:
    """The environment to run in; raises SystemExit if jemalloc is missing or unusable."""
    changed = dict(environment)
    if allocator != "jemalloc":
        changed = {k: v for k, v in changed.items() if not configures_malloc(k)}
        libraries = changed.pop("LD_PRELOAD", "").replace(":", " ").split()
        if others := [name for name in libraries if "malloc" not in Path(name).name]:
            changed["LD_PRELOAD"] = ":".join(others)
        return changed
    if not sys.platform.startswith("linux"):
        raise SystemExit("jemalloc can be preloaded only on Linux: add --allocators default.")
    if jemalloc is None:
        raise SystemExit(_MISSING)
    preloaded = environment.get("LD_PRELOAD")
    changed["LD_PRELOAD"] = f"{jemalloc}:{preloaded}" if preloaded else jemalloc
    changed["MALLOC_CONF"] = MALLOC_CONF
    return changed


def options_for(allocator: str, options: Sequence[str]) -> list[str]:
    """The benchmark's options, with the allocator added to the name of the output file."""
    changed = list(options)
    for index, option in enumerate(options):
        if option == "--output" and index + 1 < len(options):
            changed[index + 1] = _with_suffix(options[index + 1], allocator)
        elif option.startswith("--output="):
            changed[index] = "--output=" + _with_suffix(option.removeprefix("--output="), allocator)
    return changed


def _with_suffix(path: str, allocator: str) -> str:
    return str(Path(path).with_stem(f"{Path(path).stem}-{allocator}"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=ALLOCATORS)
    parser.add_argument("options", nargs="*", help="options of benchmarks.sites.run, after --")
    parsed = parser.parse_args(arguments)
    jemalloc = find_jemalloc()
    environments = {name: environment_for(name, os.environ, jemalloc) for name in parsed.allocators}
    for allocator, environment in environments.items():
        options = options_for(allocator, parsed.options)
        command = [sys.executable, "-m", "benchmarks.sites.run", *options]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
