"""Why an installation has no kernels, and the way out: for warnings, errors and the doctor."""

import importlib.metadata
import pathlib


def shadowed_package() -> pathlib.Path | None:
    """The package that pip installed, where another copy of it was imported: a checkout's sources.

    None where the copy that runs is the installed one, or where the installation is editable.
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


def why_no_native_module(load_error: ImportError) -> tuple[str, str]:
    """The reason and the way out where the CPU kernels did not load."""
    shadowed = shadowed_package()
    if shadowed is None:
        return (
            f"the native module of jax_bnar did not load ({load_error})",
            "install the package with `pip install .` in its sources; it needs a C++17 compiler"
            " (GCC >= 9 or Clang >= 12)",
        )
    return (
        f"the sources in {imported_package()}, which have no native module, were imported in the"
        f" place of the installed package in {shadowed}",
        "start Python in another folder, or with `python -P`, which leaves the current folder out"
        " of the search for modules",
    )


def why_no_cuda_module(load_error: ImportError) -> tuple[str, str]:
    """The same where the CUDA kernels are there and did not load."""
    return (
        f"the native module of the CUDA kernels did not load ({load_error})",
        "install jax-bnar and jax-bnar-cuda13 anew, both in one version",
    )
