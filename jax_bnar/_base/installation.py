"""Why an installation has no kernels and how to fix it, for warnings, errors and the doctor."""

import importlib.machinery
import importlib.metadata
import pathlib


def shadowed_package() -> pathlib.Path | None:
    """The installed package, if another copy of it (such as a checkout) was imported instead.

    None if the imported copy is the installed one, or if the installation is editable.
    """
    try:
        distribution = importlib.metadata.distribution("jax-bnar")
    except importlib.metadata.PackageNotFoundError:
        return None
    installed = pathlib.Path(str(distribution.locate_file("jax_bnar"))).resolve()
    whole = (installed / "__init__.py").exists()
    return installed if whole and installed != imported_package() else None


def imported_package() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parents[1]


def _has_native_module(package: pathlib.Path) -> bool:
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return any((package / f"_native{suffix}").exists() for suffix in suffixes)


def why_no_native_module(load_error: ImportError) -> tuple[str, str]:
    """The reason and the way out if the CPU kernels did not load."""
    shadowed = shadowed_package()
    # A module that is there but damaged is the reason, whatever else is installed.
    if shadowed is None or _has_native_module(imported_package()):
        return (
            f"the native module of jax_bnar did not load ({load_error})",
            "install the package by running `pip install .` in its source tree; it needs a C++17"
            " compiler (GCC >= 10 or Clang >= 12)",
        )
    return (
        f"the sources in {imported_package()}, which have no native module, were imported instead"
        f" of the installed package in {shadowed}",
        "start Python in another folder, or with `python -P`, which does not search the current"
        " folder for modules",
    )


def why_no_cuda_module(load_error: ImportError) -> tuple[str, str]:
    """The reason and the way out if there are CUDA kernels but they did not load."""
    return (
        f"the native module of the CUDA kernels did not load ({load_error})",
        "reinstall jax-bnar and jax-bnar-cuda13, as `make dist` built them together",
    )
