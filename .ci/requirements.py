"""Prints requirements from pyproject.toml, one per line: requirements.py WHAT.

WHAT is "build-tools" (what is needed to build the native module, except jaxlib), "build-headers"
(the jaxlib whose FFI headers the module is compiled against), "cuda-compiler" (nvcc and what it
needs), or a list of extras such as "demo,test" (their requirements and the package's own
dependencies).
"""

import pathlib
import re
import sys
import tomllib

PROJECT = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())


def requirements(what: str) -> list[str]:
    if what == "cuda-compiler":
        return PROJECT["tool"]["jax-bnar"]["cuda-compiler"]
    build = PROJECT["build-system"]["requires"] + PROJECT["tool"]["jax-bnar"]["build-requires"]
    if what == "build-headers":
        return [requirement for requirement in build if name(requirement) == "jaxlib"]
    if what == "build-tools":
        # An isolated build would install cmake and ninja where the machine has none.
        return [r for r in build if name(r) != "jaxlib"] + ["cmake>=3.18", "ninja"]
    extras = PROJECT["project"]["optional-dependencies"]
    found = list(PROJECT["project"]["dependencies"])
    for extra in what.split(","):
        found += extras[extra]
    return list(dict.fromkeys(found))


def name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    print(*requirements(sys.argv[1]), sep="\n")
