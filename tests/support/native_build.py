"""Runs build tools such as CMake, and shows their output if they fail."""

import os
import pathlib
import shutil
import subprocess
import sysconfig

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
