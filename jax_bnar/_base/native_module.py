"""The native modules `native` (CPU) and `cuda`, or the errors that kept them from loading."""

import importlib
import importlib.util
from typing import Any

import jax_bnar
from jax_bnar._base import startup

CUDA_DISTRIBUTION = "jax-bnar-cuda13"
_CUDA_PACKAGE = "jax_bnar_cuda13"


def _load(name: str) -> tuple[Any, ImportError | None]:
    """The module, or the error. In the doctor, a crash while loading becomes an error too."""
    trouble = startup.trouble_of_native_module(name) if startup.is_doctor() else None
    if trouble is not None:
        return None, trouble
    try:
        return importlib.import_module(name), None
    except ImportError as error:  # a source tree that was never built
        return None, error


def _load_cuda() -> tuple[Any, ImportError | None]:
    """The CUDA module that was built with this package, or that of `jax_bnar_cuda13`, or None.

    Raises:
        ImportError: `jax_bnar_cuda13` has another version. (In the doctor, this is returned.)
    """
    if importlib.util.find_spec("jax_bnar._cuda") is not None:
        return _load("jax_bnar._cuda")
    if importlib.util.find_spec(_CUDA_PACKAGE) is None:
        return None, None
    ours, theirs = jax_bnar.__version__, importlib.import_module(_CUDA_PACKAGE).__version__
    if ours == theirs:
        return _load(f"{_CUDA_PACKAGE}._cuda")
    # Operands and attributes of the custom calls may differ between versions.
    mismatch = ImportError(
        f"jax_bnar {ours} works only with {CUDA_DISTRIBUTION} {ours}, which contains its CUDA"
        f" kernels, but found version {theirs}: install both in the same version, or"
        f" `pip uninstall {CUDA_DISTRIBUTION}`",
        name="jax_bnar",
    )
    if not startup.is_doctor():
        raise mismatch
    return None, mismatch


native, load_error = _load("jax_bnar._native")
cuda, cuda_load_error = _load_cuda()
