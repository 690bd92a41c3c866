"""The native module has the functions that its stub declares and that the package uses."""

import ast
import inspect
import pathlib

import pytest
from checkout import ROOT

import jax_bnar
from jax_bnar._kernels import kernel_call, targets

PACKAGE = pathlib.Path(jax_bnar.__file__).parent
NATIVE_NAMES = {"_native", "native"}

assert targets._native is not None
native = targets._native


def declared() -> set[str]:
    stub = ast.parse((PACKAGE / "_native.pyi").read_text())
    return {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}


def used(source: pathlib.Path) -> set[str]:
    """Attributes of the native module that a file uses, under any of the module's names there."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name in NATIVE_NAMES:
                found.add(node.attr)
    return found


def sources() -> list[pathlib.Path]:
    return [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]


def test_the_stub_declares_what_there_is() -> None:
    there = {name for name, _ in inspect.getmembers(native, callable) if not name.startswith("_")}
    if native.cpu_isa() == "emulation of CUDA":
        pytest.skip("the emulated module has only some of the functions")
    assert there == declared()


def test_whatever_is_asked_for_exists() -> None:
    asked = {name for source in sources() for name in used(source)}
    assert {"registrations", "cuda_version", "runtime_ffi_api_version", "cuda_launches"} <= asked
    assert asked - {"__file__"} <= declared()


def test_cuda_of_the_build() -> None:
    version = native.cuda_version()
    architectures = native.cuda_architectures()
    has_cuda = ("forward", "cuda") in targets.registered
    assert (version is not None) == (len(architectures) > 0) == has_cuda
    if version is not None:
        assert version >= (12, 0)
        assert architectures == sorted(architectures)
        assert architectures[0] >= 70


@pytest.mark.parametrize("platform", ["cpu", "CUDA"])
def test_bound_on_the_workspace(platform: str) -> None:
    """The bound is linear in groups and channels and independent of rows and inner.

    It is 0 on platforms that need no workspace.
    """
    bound, per_group, per_channel = native.workspace_bound(platform)
    for groups, rows, channels, inner in [
        (1, 1, 1, 1),
        (1, 1 << 22, 251, 1),
        (64, 4096, 2048, 1),
        (3, 31, 5, 49),
        (1, 7, 1 << 20, 1),
    ]:
        exact = native.workspace_bytes(platform, groups, rows, channels, inner)
        assert 0 <= exact <= bound + groups * (per_group + channels * per_channel)
        assert (exact == 0) == (bound == 0)


def test_every_operation_has_a_kernel() -> None:
    """native/operations.h and jax_bnar/_base/signatures.py list the same names."""
    names = [operation.name for operation in kernel_call.OPERATIONS]
    for platform, handlers in native.registrations().items():
        assert list(handlers) == names, platform
