"""Tests the cuDNN peer of the GPU benchmark on a stand-in for cuDNN that runs on the host.

tests/cudnn_stub does in plain loops what cuDNN does, and rejects what cuDNN would reject or
misread. Mistakes in the binding therefore show here and not only on a GPU.
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from checkout import ROOT
from native_build import run, tool

torch = pytest.importorskip("torch", reason="the peer runs on PyTorch's tensors")
from benchmarks.common.sites import Form, FormOfOneInput, Site  # noqa: E402
from benchmarks.gpu import cudnn, torch_benchmark  # noqa: E402
from benchmarks.gpu.cudnn_peer import make_pass  # noqa: E402
from benchmarks.gpu.work import Wave  # noqa: E402

BATCH = 3
SETS = 2
CHANNELS = 6
# Relative and absolute tolerance. Each result is rounded once, from double.
TOLERANCES = {"float16": (1e-3, 1e-5), "float32": (1e-5, 1e-5)}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cudnn") / "libcudnn_stub.so.9"
    compiler = os.environ.get("CXX") or tool("g++")
    source = ROOT / "tests" / "cudnn_stub" / "cudnn_stub.cc"
    # The dynamic linker knows a loaded library by this name.
    name = [f"-Wl,-soname,{path.name}"] if sys.platform == "linux" else []
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *name]
    run(compiler, *options, source, "-o", path)
    return path


@pytest.fixture
def library(stub: Path) -> Iterator[cudnn.Library]:
    """Checks that everything a test creates is destroyed when it ends."""
    yield cudnn.Library(stub)
    assert ctypes.CDLL(str(stub)).cudnnStubLiveObjects() == 0


def site_of(form: Form) -> Site:
    return Site(2, 5, CHANNELS, form)


def operands_of(form: Form, dtype: Any) -> tuple[list[Any], list[Any]]:
    """Operands as in the benchmark, but with vectors whose elements differ."""
    wave = Wave(BATCH, dtype, ("cudnn",))
    activations, _ = torch_benchmark.make_sets(site_of(form), wave, SETS, "cpu")
    random = torch.Generator().manual_seed(1)
    scale, bias, running_mean = torch.randn(3, CHANNELS, generator=random).unbind()
    running_var = 0.5 + torch.rand(CHANNELS, generator=random)
    vectors = [scale.clone().requires_grad_(), bias.clone().requires_grad_()]
    return activations, [*vectors, running_mean.clone(), running_var]


def in_double(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)


def leaves(results: Any) -> list[Any]:
    return [tensor for y, gradients in results for tensor in (y, *gradients)]


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("form", get_args(FormOfOneInput))
def test_equals_torch(library: cudnn.Library, form: Form, dtype: str) -> None:
    """Compares with PyTorch's operators and their gradients in float64."""
    activations, vectors = operands_of(form, dtype)
    wide_activations = [tuple(map(in_double, operands)) for operands in activations]
    wide_vectors = list(map(in_double, vectors))
    expected = torch_benchmark.make_pass("torch", site_of(form), wide_activations, wide_vectors)()
    step = make_pass(site_of(form), activations, vectors, library=library)
    results = step()

    assert [len(gradients) for _, gradients in results] == [3 + (form == "bn_add_relu")] * SETS
    rtol, atol = TOLERANCES[dtype]
    for got, wanted in zip(leaves(results), leaves(expected), strict=True):
        assert got.dtype == (getattr(torch, dtype) if got.ndim == 4 else torch.float32)
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=atol)
    for got, wanted in zip(vectors[2:], wide_vectors[2:], strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)

    # Each step allocates new memory, so results of the previous step stay intact.
    again = step()
    addresses = [tensor.data_ptr() for tensor in leaves(results) + leaves(again)]
    assert len(set(addresses)) == len(addresses)


def test_refusal_names_call_status_and_configuration(library: cudnn.Library) -> None:
    activations, vectors = operands_of("bn_add_relu", "bfloat16")
    expected = (
        r"^cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize gave"
        r" CUDNN_STATUS_NOT_SUPPORTED \(3000\) for 2x5x6 bn_add_relu, batch 3, bfloat16:"
        r" the stub supports only float and half$"
    )
    with pytest.raises(RuntimeError, match=expected) as refused:
        make_pass(site_of("bn_add_relu"), activations, vectors, library=library)
    assert isinstance(refused.value, cudnn.CudnnError)
    assert refused.value.status == 3000
    assert refused.value.is_not_supported


def test_unknown_dtype(library: cudnn.Library) -> None:
    dtype: Any = "float64"
    with pytest.raises(ValueError, match="dtype is 'float64', expected one of float32, float16"):
        cudnn.BatchNormAddRelu(
            library, site_of("bn_relu"), BATCH, dtype, epsilon=1e-5, average_factor=0.1
        )


def test_joins_of_two_inputs_are_refused(library: cudnn.Library) -> None:
    site = site_of("dual_bn_add_relu")
    with pytest.raises(ValueError, match="cuDNN has no operation for 2x5x6 dual_bn_add_relu"):
        cudnn.BatchNormAddRelu(library, site, BATCH, "float32", epsilon=1e-5, average_factor=0.1)
    with pytest.raises(ValueError, match="2x5x6 dual_bn_add_relu has two inputs, expected one of"):
        operands_of(site.form, "float32")


def forward_and_backward(
    library: cudnn.Library,
    form: Form,
    *,
    forget_forward: bool = False,
    wrong_y: bool = False,
    **changed: Any,
) -> None:
    """Makes both calls on addresses, some of which are changed for forward."""
    activations, (scale, bias, running_mean, running_var) = operands_of(form, "float32")
    x, z, dy = activations[0]
    y, dx, dz = (torch.empty_like(x) for _ in range(3))
    saved, gradients = torch.empty(2, CHANNELS), torch.empty(2, CHANNELS)
    with cudnn.BatchNormAddRelu(
        library, site_of(form), BATCH, "float32", epsilon=1e-5, average_factor=0.1
    ) as operation:
        sizes = operation.forward_workspace_bytes, operation.backward_workspace_bytes
        workspace = torch.empty(max(sizes), dtype=torch.uint8)
        reserve_space = torch.zeros(operation.reserve_space_bytes, dtype=torch.uint8)
        common: dict[str, Any] = {
            "x": x.data_ptr(),
            "y": y.data_ptr(),
            "scale": scale.data_ptr(),
            "bias": bias.data_ptr(),
            "saved_mean": saved[0].data_ptr(),
            "saved_inverse_std": saved[1].data_ptr(),
            "workspace": workspace.data_ptr(),
            "reserve_space": reserve_space.data_ptr(),
            "stream": 0,
        }
        forward: dict[str, Any] = {
            "z": None if z is None else z.data_ptr(),
            "running_mean": running_mean.data_ptr(),
            "running_var": running_var.data_ptr(),
        }
        backward: dict[str, Any] = {
            "dy": dy.data_ptr(),
            "dx": dx.data_ptr(),
            "dz": None if z is None else dz.data_ptr(),
            "dscale": gradients[0].data_ptr(),
            "dbias": gradients[1].data_ptr(),
        }
        if not forget_forward:
            operation.forward(**common | forward | changed)
        if wrong_y:
            common["y"] = dy.data_ptr()
        operation.backward(**common | backward)


@pytest.mark.parametrize(
    ("form", "changed", "why"),
    [
        ("bn_relu", {"stream": 1}, r"cudnnSetStream gave CUDNN_STATUS_BAD_PARAM \(2000\)"),
        ("bn_relu", {"x": None}, "ForwardTrainingEx gave .*: a pointer is null"),
        ("bn_add_relu", {"z": None}, "ForwardTrainingEx gave .*: z is missing"),
        ("bn_relu", {"z": 64}, "ForwardTrainingEx gave .*: z is missing or superfluous"),
        ("batch_norm", {"forget_forward": True}, "BackwardEx gave .*: the reserve space is not"),
        ("bn_relu", {"wrong_y": True}, "BackwardEx gave .*: y is not the result of the forward"),
    ],
)
def test_wrong_calls_are_refused(
    library: cudnn.Library, form: Form, changed: dict[str, Any], why: str
) -> None:
    forward_and_backward(library, form)
    with pytest.raises(cudnn.CudnnError, match=why):
        forward_and_backward(library, form, **changed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, z, dy: (x.contiguous(), z, dy), "x has strides"),
        (lambda x, z, dy: (x, z[:, :, 1:], dy), "z is .*expected .*3, 6, 2, 5"),
        (lambda x, z, dy: (x, z, dy.double()), "dy is .*float64.*expected .*float16"),
        (lambda x, z, dy: (x, None, dy), "z is missing for 2x5x6 bn_add_relu"),
    ],
    ids=["layout", "shape", "dtype", "missing"],
)
def test_operands_that_cudnn_would_misread(
    library: cudnn.Library, change: Callable[..., Any], why: str
) -> None:
    activations, vectors = operands_of("bn_add_relu", "float16")
    changed = [activations[0], change(*activations[1])]
    with pytest.raises(ValueError, match=why):
        make_pass(site_of("bn_add_relu"), changed, vectors, library=library)


def test_vectors_are_float32(library: cudnn.Library) -> None:
    activations, vectors = operands_of("bn_relu", "float16")
    vectors[1] = vectors[1].half()
    with pytest.raises(ValueError, match=r"bias is .*float16.*expected .*float32"):
        make_pass(site_of("bn_relu"), activations, vectors, library=library)


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_FILE", "libcudnn_nowhere.so.9")
    expected = (
        r"libcudnn_nowhere.so.9 is not there: looked among the libraries of this process .*"
        r" in the wheel nvidia-cudnn-cu13 .* in the wheel nvidia-cudnn-cu12 .*"
        r" where the system has its libraries .*Install nvidia-cudnn-cu13, or give"
    )
    with pytest.raises(OSError, match=expected):
        cudnn.Library()
    with pytest.raises(OSError, match="/no/such/libcudnn"):
        cudnn.Library("/no/such/libcudnn.so.9")


def test_library_without_the_legacy_api() -> None:
    with pytest.raises(OSError, match=r"_C.* has no cudnnCreate: expected cuDNN 9"):
        cudnn.Library(torch._C.__file__)


@pytest.mark.skipif(sys.platform != "linux", reason="the stub has no soname")
def test_loaded_library_is_found(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded library is found although no search path has one of this name."""
    ctypes.CDLL(str(stub))
    monkeypatch.setattr(cudnn, "_FILE", stub.name)
    assert cudnn.Library().version == cudnn.Library(stub).version


def test_library_of_a_wheel_is_found(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "libcudnn_of_a_wheel.so.9"
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(stub, folder / name)
    record = tmp_path / "nvidia_cudnn_cu12-9.0.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu12\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cudnn, "_FILE", name)
    assert cudnn.Library().version == cudnn.Library(stub).version
