"""Runs CMake and its like, and shows what they printed where they fail."""

import os
import pathlib
import shutil
import subprocess
import sysconfig

import pytest
from checkout import ROOT

# CMake and ninja as wheels install them, or the system's.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
# A preloaded allocator keeps AddressSanitizer from coming first.
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
        pytest.fail(f"{name} is missing: `pip install {name}`", pytrace=False)
    return found
