"""Runs build tools such as CMake, and shows their output if they fail."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence

import pytest
from checkout import ROOT

# CMake and ninja may be installed by wheels or by the system.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
# AddressSanitizer must be loaded first, so nothing may be preloaded before it.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {
    "PATH": PATH,
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def run(*command: str | pathlib.Path, directory: pathlib.Path = ROOT) -> None:
    finished = subprocess.run(
        command,
        cwd=directory,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What a failing program prints need not be text.
        errors="replace",
    )
    if finished.returncode != 0:
        printed = " ".join(map(str, command))
        pytest.fail(
            f"{printed}\nexit status {finished.returncode}\n{finished.stdout[-8000:]}",
            pytrace=False,
        )


def tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.fail(f"{name} was not found: `pip install {name}`", pytrace=False)
    return found


def build(name: str, options: Sequence[str], targets: Sequence[str] = ()) -> pathlib.Path:
    """Configures and builds in build/native-NAME, which keeps objects between runs.

    A name belongs to one file of tests, because files run at the same time.
    """
    directory = ROOT / "build" / f"native-{name}"
    # Discard what an older CMake, ninja or compiler has cached.
    (directory / "CMakeCache.txt").unlink(missing_ok=True)
    run(
        tool("cmake"), "-S", ROOT, "-B", directory, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        "-DJAX_BNAR_MODULE=OFF", "-DJAX_BNAR_NATIVE_TESTS=ON",
        "-DJAX_BNAR_WARNINGS_AS_ERRORS=ON", *options,
    )  # fmt: skip
    run(tool("cmake"), "--build", directory, *(f"--target={target}" for target in targets))
    return directory


def optional_tool(name: str, package: str, variable: str) -> str:
    """The path of a program, without which a test is skipped, or fails if `variable` is set."""
    found = shutil.which(name, path=PATH)
    if found is None:
        message = f"{name} is missing (Debian: {package})"
        if os.environ.get(variable):
            pytest.fail(f"{message}, and {variable} is set", pytrace=False)
        pytest.skip(message)
    return found


def check_vectors(directory: pathlib.Path, isas: Sequence[str]) -> None:
    """Reads the kernels' objects in a build folder: vectors and pointers stay in registers."""
    for isa in isas:
        objects = sorted((directory / "CMakeFiles" / f"bnar_tiles_{isa}.dir").rglob("*.o"))
        assert len(objects) == 12
        run(sys.executable, ROOT / ".ci" / "cpu_instructions.py", *objects)


def aarch64_options() -> Sequence[str]:
    """Those of a build by the cross compiler."""
    compiler = optional_tool(
        "aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu", "JAX_BNAR_REQUIRE_AARCH64"
    )
    return (
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        # The checks of single elements, not the kernels, which have options of their own.
        "-DCMAKE_CXX_FLAGS=-O1",
    )
