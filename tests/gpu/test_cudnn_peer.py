"""Tests the cuDNN peer of the GPU benchmark as far as it goes without a GPU.

PyTorch brings cuDNN itself, whose functions are looked up here and whose refusal is read. What they
compute is compared with PyTorch's own operators wherever the peer is timed, by
torch_benchmark.check.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the peer runs on PyTorch's tensors")
from benchmarks.common.sites import Form, Site  # noqa: E402
from benchmarks.gpu import cudnn, torch_benchmark  # noqa: E402
from benchmarks.gpu.cudnn_peer import make_pass  # noqa: E402
from benchmarks.gpu.work import Wave  # noqa: E402
from jax_bnar import _native  # noqa: E402

BATCH = 3
SETS = 2
# A library that neither is nor needs cuDNN.
NO_CUDNN = _native.__file__


@pytest.fixture(scope="module")
def library() -> cudnn.Library:
    if not torch.backends.cudnn.is_available():
        pytest.skip("this PyTorch comes without cuDNN")
    return cudnn.Library()


def site_of(form: Form) -> Site:
    return Site(2, 5, 6, form)


def operands_of(form: Form, dtype: Any) -> tuple[list[Any], list[Any]]:
    return torch_benchmark.make_sets(site_of(form), Wave(BATCH, dtype, ("cudnn",)), SETS, "cpu")


def operation_of(library: cudnn.Library, site: Site, dtype: Any) -> cudnn.BatchNormAddRelu:
    return cudnn.BatchNormAddRelu(library, site, BATCH, dtype, epsilon=1e-5, average_factor=0.1)


def test_cudnn_has_the_functions(library: cudnn.Library) -> None:
    """Looking one up that is missing is an error."""
    assert library.version // 10000 == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, cuDNN does not refuse this")
@pytest.mark.usefixtures("library")
def test_refusal_names_call_status_and_configuration() -> None:
    activations, vectors = operands_of("bn_add_relu", "bfloat16")
    expected = (
        r"^cudnnCreate gave CUDNN_STATUS_NOT_INITIALIZED \(1001\)"
        r" for 2x5x6 bn_add_relu, batch 3, bfloat16(: |$)"
    )
    with pytest.raises(cudnn.CudnnError, match=expected) as refused:
        make_pass(site_of("bn_add_relu"), activations, vectors)
    assert refused.value.status == 1001
    assert not refused.value.is_not_supported


def test_a_configuration_that_is_not_supported() -> None:
    assert cudnn.CudnnError("", 3000).is_not_supported
    assert cudnn.CudnnError("", 3999).is_not_supported
    assert not cudnn.CudnnError("", 4000).is_not_supported


def test_unknown_dtype(library: cudnn.Library) -> None:
    with pytest.raises(ValueError, match="dtype is 'float64', expected one of float32, float16"):
        operation_of(library, site_of("bn_relu"), "float64")


def test_joins_of_two_inputs_are_refused(library: cudnn.Library) -> None:
    site = site_of("dual_bn_add_relu")
    with pytest.raises(ValueError, match="cuDNN has no operation for 2x5x6 dual_bn_add_relu"):
        operation_of(library, site, "float32")
    with pytest.raises(ValueError, match="2x5x6 dual_bn_add_relu has two inputs, expected one of"):
        operands_of(site.form, "float32")


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
def test_operands_that_cudnn_would_misread(change: Callable[..., Any], why: str) -> None:
    activations, vectors = operands_of("bn_add_relu", "float16")
    changed = [activations[0], change(*activations[1])]
    with pytest.raises(ValueError, match=why):
        make_pass(site_of("bn_add_relu"), changed, vectors)


def test_vectors_are_float32() -> None:
    activations, vectors = operands_of("bn_relu", "float16")
    vectors[1] = vectors[1].half()
    with pytest.raises(ValueError, match=r"bias is .*float16.*expected .*float32"):
        make_pass(site_of("bn_relu"), activations, vectors)


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
    with pytest.raises(OSError, match=r"_native.* has no cudnnCreate: expected cuDNN 9"):
        cudnn.Library(NO_CUDNN)


def test_loaded_library_is_found(library: cudnn.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has loaded cuDNN, from a folder that the linker does not search."""
    monkeypatch.setattr(cudnn, "_WHEELS", ())
    assert cudnn.Library().version == library.version


def test_library_of_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "libcudnn_of_a_wheel.so.9"
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(NO_CUDNN, folder / name)
    record = tmp_path / "nvidia_cudnn_cu12-9.0.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu12\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cudnn, "_FILE", name)
    with pytest.raises(OSError, match=f"{folder / name} has no cudnnCreate"):
        cudnn.Library()
