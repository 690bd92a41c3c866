"""The build backend: scikit-build-core's, which looks for a compiler and Python's headers first.

pip installs what `build-system.requires` names, asks the backend what else the build needs, and
installs that. Then it downloads all that jax_bnar needs at run time, and only then CMake starts.
So the backend names jaxlib, whose headers the build needs (it is in `tool.jax-bnar` of
pyproject.toml), and on a machine without a compiler, or without Python's headers, pip ends before
it has fetched hundreds of megabytes.
"""

import os
import pathlib
import shlex
import shutil
import sysconfig
import tomllib
from collections.abc import Mapping
from typing import Any

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403 (the other hooks, of which some depend on settings)

# Those that CMake tries by itself. It decides; this list only has to contain what it may find.
_COMPILERS = ("c++", "CC", "g++", "aCC", "cl", "bcc", "xlC", "icpx", "icx", "clang++")
# Where a user may name a compiler, besides CXX, which is looked up.
_VARIABLES = ("CMAKE_ARGS", "CMAKE_CXX_COMPILER", "CMAKE_TOOLCHAIN_FILE", "SKBUILD_CMAKE_DEFINE")

Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    require_compiler(config_settings)
    require_headers(config_settings)
    return [*_scikit_build.get_requires_for_build_wheel(config_settings), *_requirements()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    require_compiler(config_settings)
    require_headers(config_settings)
    return [*_scikit_build.get_requires_for_build_editable(config_settings), *_requirements()]


def require_compiler(config_settings: Settings = None) -> None:
    """Ends the build where CMake would find no C++ compiler; `CMakeLists.txt` says the same."""
    if _is_set("CXX_COMPILER", config_settings):
        return
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    if any(shutil.which(name) for name in named or _COMPILERS):
        return
    found = f"CXX names {named[0]}, which does not exist" if named else "none was found"
    raise SystemExit(
        f"jax_bnar: building from the sources needs a C++17 compiler, and {found}. Install"
        " g++ >= 10 or clang++ >= 12 (Debian, Ubuntu: apt install g++), or set CXX. Wheels need no"
        " compiler."
    )


def require_headers(config_settings: Settings = None) -> None:
    """Ends the build where CMake would not find Python.h, as with Debian's Python by itself."""
    folders = {sysconfig.get_config_var("INCLUDEPY"), sysconfig.get_path("include")} - {None}
    found = any(pathlib.Path(folder, "Python.h").exists() for folder in folders)
    if found or _is_set("Python_", config_settings):
        return
    raise SystemExit(
        "jax_bnar: building from the sources needs Python's headers, and there is no Python.h in"
        f" {' or '.join(sorted(folders))}. Install them (Debian, Ubuntu: apt install python3-dev;"
        " Fedora: dnf install python3-devel), or use a Python that has them, such as uv's."
        " Wheels need none."
    )


def _is_set(option: str, config_settings: Settings) -> bool:
    """Whether an option of CMake may be set, where only CMake knows what comes of it."""
    return any(option in f"{k}={v}" for k, v in (config_settings or {}).items()) or any(
        name in os.environ for name in _VARIABLES
    )


def _requirements() -> list[str]:
    project = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    return tomllib.loads(project.read_text())["tool"]["jax-bnar"]["build-requires"]
