"""The native module has the functions that its stub declares and that the package uses."""

import ast
import inspect
import pathlib

import pytest
from checkout import ROOT

import jax_bnar
from jax_bnar._kernels import kernel_call, targets

PACKAGE = pathlib.Path(jax_bnar.__file__).parent
NATIVE_NAMES = {"_native": "_native", "native": "_native", "_cuda": "_cuda", "cuda_module": "_cuda"}

assert targets.native is not None
native = targets.native


def declared(name: str) -> set[str]:
    stub = ast.parse((PACKAGE / f"{name}.pyi").read_text())
    return {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}


def used(source: pathlib.Path) -> set[tuple[str, str]]:
    """(module, attribute) for what a file uses of the native modules, under any of their names."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name in NATIVE_NAMES:
                found.add((NATIVE_NAMES[name], node.attr))
    return found


def sources() -> list[pathlib.Path]:
    return [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]


@pytest.mark.parametrize("name", ["_native", "_cuda"])
def test_the_stub_declares_what_there_is(name: str) -> None:
    module = {"_native": native, "_cuda": targets.cuda}[name]
    if module is None:
        pytest.skip("this build has no CUDA kernels")
    there = {name for name, _ in inspect.getmembers(module, callable) if not name.startswith("_")}
    if native.cpu_isa() == "emulation of CUDA":
        pytest.skip("the emulated module has only some of the functions")
    assert there == declared(name)


def test_whatever_is_asked_for_exists() -> None:
    asked = {item for source in sources() for item in used(source)}
    assert {("_native", "runtime_ffi_api_version"), ("_cuda", "cuda_version")} <= asked
    for name in ("_native", "_cuda"):
        assert {a for module, a in asked if module == name} - {"__file__"} <= declared(name)


def test_cuda_of_the_build() -> None:
    cuda = targets.cuda
    assert (cuda is not None) == (("forward", "cuda") in targets.kernels)
    if cuda is None:
        assert targets.why_no_cuda()
        return
    architectures = cuda.cuda_architectures()
    assert cuda.cuda_version() >= (12, 0)
    assert architectures == sorted(architectures)
    assert architectures[0] >= 70
    assert cuda.ffi_api_version() == native.ffi_api_version()


@pytest.mark.parametrize("platform", ["cpu", "CUDA"])
def test_bound_on_the_workspace(platform: str) -> None:
    """The bound is linear in groups and channels and independent of rows and inner.

    It is 0 on platforms that need no workspace.
    """
    module = targets.modules.get(platform)
    if module is None:
        pytest.skip("this build has no CUDA kernels")
    bound, per_group, per_channel = module.workspace_bound(platform)
    for groups, rows, channels, inner in [
        (1, 1, 1, 1),
        (1, 1 << 22, 251, 1),
        (64, 4096, 2048, 1),
        (3, 31, 5, 49),
        (1, 7, 1 << 20, 1),
    ]:
        exact = module.workspace_bytes(platform, groups, rows, channels, inner)
        assert 0 <= exact <= bound + groups * (per_group + channels * per_channel)
        assert (exact == 0) == (bound == 0)


@pytest.mark.parametrize("platform", ["cpu", "CUDA"])
def test_channels_of_a_mask_that_lie_together(platform: str) -> None:
    module = targets.modules.get(platform)
    if module is None:
        pytest.skip("this build has no CUDA kernels")
    for groups, rows, channels, together in [
        (1, 9, 64, 64), (2, 1, 80, 16), (1, 1 << 33, 8, 8), (1, 9, 96, 32), (3, 2, 640, 128),
    ]:  # fmt: skip
        expected = 0 if platform == "cpu" else together
        assert module.mask_channels(platform, groups, rows, channels, 1) == expected
    for channels, inner in [(65, 1), (64, 49)]:
        assert module.mask_channels(platform, 1, 9, channels, inner) == 0


def test_every_operation_has_a_kernel() -> None:
    """native/operations.h and jax_bnar/_base/signatures.py list the same names."""
    names = [operation.name for operation in kernel_call.ALL]
    for platform, module in targets.modules.items():
        assert list(module.registrations()[platform]) == names, platform
