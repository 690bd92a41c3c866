"""The peers of the benchmark of sites: each computes the step, or says why it cannot here."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

for _package in ("flax", "matplotlib", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.common import isa  # noqa: E402
from benchmarks.common.sites import (  # noqa: E402
    Form,
    Site,
)
from benchmarks.sites import (  # noqa: E402
    checked,
    peers,
)
from benchmarks.sites import run as sites_run  # noqa: E402
from benchmarks.sites.peers import (  # noqa: E402
    PeerName,
    Step,
    UnavailableError,
    _dnnl_library,
    _onednn_plan,
)
from benchmarks.sites.problem import (  # noqa: E402
    DType,
    Layout,
    check_results,
    expected,
    make_problem,
)

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize("field", ["y", "running_var", "dx", "dz", "dscale", "dbias"])
def test_a_peer_that_computes_something_else_is_refused(field: str):
    problem = make_problem(Site(3, 3, 5, "bn_add_relu"), 4, "float32")
    reference = expected(problem)
    check_results("right", problem, reference, reference)
    for wrong in (getattr(reference, field) + np.float32(0.1), getattr(reference, field) * np.nan):
        with pytest.raises(ValueError, match=f"wrong at 3x3x5 bn_add_relu float32: {field}"):
            check_results("wrong", problem, reference._replace(**{field: wrong}), reference)


def test_a_missing_package_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """None in sys.modules makes `import torch` fail, as if it were not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in ("_torch", "torch_eager", "torch_compiled"):
        monkeypatch.delitem(sys.modules, f"benchmarks.sites.peers.{module}", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    output = tmp_path / "missing.json"
    options = sites_run.Options(
        ("float32",), 1, ("ours", "torch", "torch_compile"), output, ("7x7x512",), 1, 1.0
    )
    sites_run.benchmark(dataclasses.replace(options, copy_mib_per_core=8))

    (run,) = json.loads(output.read_text())["runs"]
    reason = "torch is not installed; pip install torch"
    missing = {"torch": reason, "torch_compile": reason}
    assert [site["unavailable"] for site in run["sites"]] == [missing]
    assert run["step"]["unavailable"] == missing
    assert set(run["step"]["peers"]) == set(run["sites"][0]["peers"]) == {"ours"}
    printed = capsys.readouterr().out
    rows = [row.split()[:5] for row in printed.splitlines()]
    for name in missing:
        assert rows.count([name, "-", "-", "not", "measured:"]) == 1
    assert "pip install torch" in " ".join(printed.split())


def test_a_run_may_have_nothing_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As when the only peer named does not have one of the dtypes."""

    def build(*_: object) -> Step:
        raise UnavailableError("no float16 here")

    monkeypatch.setattr(peers, "build", build)
    output = tmp_path / "nothing.json"
    options = sites_run.Options(("float16",), 1, ("torch",), output, ("7x7x512",), 1, 1.0)
    document = sites_run.benchmark(dataclasses.replace(options, copy_mib_per_core=8))
    assert document["runs"][0]["step"]["unavailable"] == {"torch": "no float16 here"}
    assert output.with_suffix(".svg").stat().st_size > 0


def test_a_wrong_peer_or_a_bug_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    problem = make_problem(Site(3, 3, 5, "bn_relu"), 4, "float32")
    reference = expected(problem)
    wrong = reference._replace(dx=reference.dx + 1)
    monkeypatch.setattr(
        peers, "build", lambda *_: Step(lambda: None, lambda: None, lambda _: wrong)
    )
    with pytest.raises(ValueError, match="flax at 3x3x5 bn_relu float32: dx is wrong"):
        checked.build(["flax"], problem)
    steps, unavailable = checked.build(["flax"], problem, leave_out_inaccurate=True)
    assert not steps
    assert "dx is wrong" in unavailable["flax"]
    with pytest.raises(ValueError, match="ours at 3x3x5 bn_relu float32: dx is wrong"):
        checked.build(["ours"], problem, leave_out_inaccurate=True)

    def fail(*_: object) -> Step:
        raise ImportError("no such name", name="benchmarks.sites.peers._torch")

    monkeypatch.undo()
    monkeypatch.setattr(peers.importlib, "import_module", fail)
    with pytest.raises(ImportError, match="no such name"):
        checked.build(["torch"], problem)


Oracle = Callable[..., Mapping[str, str]]


@pytest.fixture
def oracle() -> Oracle:
    """Compares a peer's results, those of a second call too, with the oracle; returns details."""

    def compare(
        name: PeerName, form: Form, dtype: DType, channels: int, layout: Layout = "NHWC"
    ) -> Mapping[str, str]:
        problem = make_problem(Site(5, 7, channels, form), 4, dtype, layout=layout)
        try:
            step = peers.build(name, problem)
        except UnavailableError as why:
            pytest.skip(str(why))
        reference = expected(problem)
        check_results(name, problem, step.to_results(step.run()), reference)
        step.forward()
        return step.details

    return compare


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["bn_relu", "bn_add_relu", "batch_norm"])
def test_onednn_computes_the_step(form: Form, dtype: DType, oracle: Oracle):
    for channels in (64, 5):  # oneDNN has optimised code only for whole vectors of channels
        details = oracle("onednn", form, dtype, channels)
        assert details["layout"] == "nhwc"
        assert {"forward", "backward"} <= details.keys()
        blocked = oracle("onednn_blocked", form, dtype, channels)
        assert blocked["layout"] in ("nChw16c", "nChw8c")
    environment = isa.describe(["onednn"])
    assert environment["onednn"]["version"].startswith("3.")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["bn_relu", "bn_add_relu", "batch_norm"])
@pytest.mark.parametrize("name", ["paddle", "tensorflow", "keras"])
def test_other_peers_compute_the_step(name: PeerName, form: Form, dtype: DType, oracle: Oracle):
    oracle(name, form, dtype, 5)


@pytest.mark.parametrize("form", ["bn_relu", "bn_add_relu", "batch_norm"])
@pytest.mark.parametrize("name", ["ours", "ours_mask", "flax", "torch", "onednn"])
def test_peers_with_channels_first(name: PeerName, form: Form, oracle: Oracle):
    details = oracle(name, form, "float32", 5, "NCHW")
    assert details.get("layout", "nchw") == "nchw"


def test_a_peer_without_channels_first_is_a_reason():
    problem = make_problem(Site(3, 3, 5, "bn_relu"), 4, "float32", layout="NCHW")
    with pytest.raises(UnavailableError, match="NHWC alone"):
        peers.build("onednn_blocked", problem)


def test_paddle_is_built_before_tensorflow(monkeypatch: pytest.MonkeyPatch):
    """Importing it afterwards ends the process."""
    assert peers.in_order(["keras", "tensorflow", "paddle", "ours"])[:2] == ["ours", "paddle"]
    monkeypatch.setitem(sys.modules, "tensorflow", mock.Mock())
    for module in [name for name in sys.modules if name.partition(".")[0] == "paddle"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "benchmarks.sites.peers.paddle_eager", raising=False)
    problem = make_problem(Site(3, 3, 5, "bn_relu"), 4, "float32")
    with pytest.raises(UnavailableError, match="imported after TensorFlow"):
        peers.build("paddle", problem)


def test_keras_with_another_backend_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    """Its backend belongs to the process, and here it may be that of a user of Keras on JAX."""
    on_jax = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", on_jax)
    monkeypatch.setitem(sys.modules, "benchmarks.sites.peers._tf", mock.Mock())
    monkeypatch.delitem(sys.modules, "benchmarks.sites.peers.keras_on_tensorflow", raising=False)
    monkeypatch.delattr(peers, "_tf", raising=False)
    problem = make_problem(Site(3, 3, 5, "bn_relu"), 4, "float32")
    with pytest.raises(UnavailableError, match="Keras was imported before and runs on jax"):
        peers.build("keras", problem)
    del sys.modules["benchmarks.sites.peers.keras_on_tensorflow"]  # it has the stand-ins


def test_blocked_layout_pads_channels_and_leaves_them_out():
    values = np.arange(2 * 3 * 5 * 11, dtype=np.float32).reshape(2, 3, 5, 11)
    (_, layout) = _onednn_plan.BLOCKED
    stored = layout.in_blocks(values)
    assert stored.shape == (2, 2, 3, 5, 8)
    assert stored[1, 1, 2, 4, 2] == values[1, 2, 4, 10]
    assert np.array_equal(layout.from_blocks(stored, 11), values)


@pytest.mark.parametrize(
    ("named", "version", "reason"),
    [
        ("libdnnl-of-nobody.so.3", 3, "oneDNN does not load: libdnnl-of-nobody"),
        (None, 2, r"this is oneDNN 2\.6\.3, .* oneDNN 3; pip install onednn-cpu-gomp, or name"),
    ],
)
def test_onednn_that_cannot_be_used_is_a_reason(
    named: str | None, version: int, reason: str, monkeypatch: pytest.MonkeyPatch
):
    load = _dnnl_library.load.__wrapped__  # what another test has loaded is no concern of this one
    monkeypatch.setenv(_dnnl_library.VARIABLE, named or "libdnnl.so.2")
    monkeypatch.setattr(_dnnl_library, "_library_of_paddle", lambda: None)
    if named is None:
        of_debian = _dnnl_library._Version(version, 6, 3, b"", 2, 0)
        versions = mock.Mock(return_value=SimpleNamespace(contents=of_debian))
        library = SimpleNamespace(dnnl_version=versions)
        monkeypatch.setattr(_dnnl_library.ctypes, "CDLL", lambda _: library)
    with pytest.raises(UnavailableError, match=reason):
        load()
