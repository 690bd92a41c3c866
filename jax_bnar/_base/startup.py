"""Checks that run before the rest of the package is imported.

Like every `python -m`, `python -m jax_bnar.doctor` imports the package `jax_bnar` first. Anything
that would make that import fail, or kill the process, is detected here, so that the doctor can
still report it.
"""

import importlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
from typing import Final, NoReturn

import jax

OLDEST_JAX: Final = (0, 10, 2)
NEWEST_TESTED_JAX: Final = "0.12.0.1"

# Loads one extension module without importing the package that contains it.
_LOAD: Final = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location(*sys.argv[1:])
importlib.util.module_from_spec(spec)
"""
_SECONDS_TO_LOAD: Final = 60


def is_doctor() -> bool:
    """Whether this process is the doctor or one of its subprocesses."""
    for option, following in zip(sys.orig_argv[1:], [*sys.orig_argv[2:], ""], strict=True):
        # The name may follow at once, and other options may come before it: -mNAME, -Pm NAME.
        if found := re.fullmatch(r"-[A-Za-z]*?m(.*)", option):
            module = found[1] or following
            if module.split(".")[:2] == ["jax_bnar", "doctor"]:
                return True
    return False


def require_jax() -> None:
    """Stops the import with one sentence if JAX is older or newer than the package supports.

    A newer JAX is stopped only if it lacks something.

    Raises:
        ImportError: `jax` is older than `OLDEST_JAX`, or newer than `NEWEST_TESTED_JAX` and without
            something that `jax_compat` uses. (In the doctor, the sentence is printed and the
            process exits.)
    """
    if jax.__version_info__ < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        reason = (
            f"jax {jax.__version__} is older than {oldest}, the oldest version jax_bnar supports"
        )
        _stop(reason, f"pip install --upgrade 'jax>={oldest}'")
    try:
        importlib.import_module("jax_bnar._base.jax_compat")
    except (ImportError, AttributeError) as error:
        reason = (
            f"jax {jax.__version__} lacks something that jax_bnar uses of it ({error}), and the"
            f" newest with which jax_bnar was tested is {NEWEST_TESTED_JAX}"
        )
        _stop(reason, f"install a newer jax_bnar, or 'jax<={NEWEST_TESTED_JAX}'", error)


def _stop(reason: str, way_out: str, cause: Exception | None = None) -> NoReturn:
    if is_doctor():
        problem = {"reason": reason, "way_out": way_out}
        if "--json" in sys.orig_argv:
            print(json.dumps({"works": False, "problems": [problem]}, indent=2))
        else:
            print(f"{reason}: {way_out}")
        sys.exit(1)
    raise ImportError(f"{reason}: {way_out}", name="jax_bnar") from cause


def trouble_of_native_module(name: str) -> ImportError | None:
    """Loads a native module in a subprocess; the error if that process died, otherwise None.

    A truncated file, or an instruction that the processor lacks, kills the process that loads the
    module. An import that merely raises an exception will raise it again in this process.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    try:
        status = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LOAD, name, spec.origin],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS_TO_LOAD,
        ).returncode
    except subprocess.TimeoutExpired:
        trouble = f"did not finish within {_SECONDS_TO_LOAD} s"
    else:
        if status >= 0:
            return None
        trouble = f"was killed by {signal_name(-status)}"
    return ImportError(
        f"{spec.origin} is damaged, or was built for another machine: a process that loaded it"
        f" {trouble}",
        name=name,
        path=spec.origin,
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
