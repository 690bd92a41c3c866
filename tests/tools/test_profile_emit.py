"""`python -m jax_bnar.profile --emit`: the profile of our own ResNet-50, from its HLO."""

import math
import pathlib
from typing import Any

import pytest
from profile_tools import DATA, failure, summary, written

from jax_bnar.profile import __main__ as command
from jax_bnar.profile import _device_times, _emit, _hlo
from jax_bnar.profile._file import read

pytest.importorskip("rich", reason="the command needs what jax-bnar[profile] installs")


HLO = """
%fused (p.0: f32[2,4], p.1: f32[4]) -> f32[2,4] {
  %p.0 = f32[2,4]{1,0} parameter(0)
  %p.1 = f32[4]{0} parameter(1)
  %b = f32[2,4]{1,0} broadcast(%p.1), dimensions={1}
  %sum = f32[2,4]{1,0} add(%p.0, %b)
  %zero = f32[] constant(0)
  %zeros = f32[2,4]{1,0} broadcast(%zero), dimensions={}
  ROOT %relu = f32[2,4]{1,0} maximum(%sum, %zeros)
}

%convolved (p.2: bf16[2,5,5,3], p.3: bf16[3,3,3,8]) -> bf16[2,5,5,8] {
  %p.2 = bf16[2,5,5,3]{3,2,1,0} parameter(0)
  %p.3 = bf16[3,3,3,8]{3,2,1,0} parameter(1)
  ROOT %c = bf16[2,5,5,8]{3,2,1,0} convolution(%p.2, %p.3), WINDOW, dim_labels=b01f_01io->b01f
}

ENTRY %main (x: f32[2,4], z: f32[2,4], b: f32[4]) -> (f32[2,4], bf16[2,5,5,8]) {
  %x = f32[2,4]{1,0} parameter(0)
  %z = f32[2,4]{1,0} parameter(1)
  %b = f32[4]{0} parameter(2)
  %i = bf16[2,5,5,3]{3,2,1,0} parameter(3)
  %k = bf16[3,3,3,8]{3,2,1,0} parameter(4)
  %t = f32[2,4]{1,0} add(%x, %z)
  %same = f32[2,4]{1,0} bitcast(%t)
  %y = f32[2,4]{1,0} fusion(%same, %b), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/add"}
  %pass = (f32[2,4]{1,0}, u8[1,1]{1,0}, u8[4096]{0}) custom-call(%y, %same, %b), TARGET, CONFIG
  %out = f32[2,4]{1,0} get-tuple-element(%pass), index=0
  %conv = bf16[2,5,5,8]{3,2,1,0} fusion(%i, %k), kind=kCustom, calls=%convolved
  ROOT %both = (f32[2,4]{1,0}, bf16[2,5,5,8]{3,2,1,0}) tuple(%out, %conv)
}
"""
for word, text in (
    ("WINDOW", "window={size=3x3 pad=1_1x1_1}"),
    ("TARGET", 'custom_call_target="jax_bnar_normalise_v1"'),
    ("CONFIG", 'backend_config={activation = "relu", has_z = true, save_mask = true}'),
):
    HLO = HLO.replace(word, text)


def test_operators_of_hlo(tmp_path: pathlib.Path) -> None:
    """The code that finds MegEngine's ADD and FUSE_ADD_RELU also finds those left by XLA."""
    add, relu, ours, convolution = _hlo.operators(HLO)
    assert (add.kind, add.mode, add.bytes, add.computation) == ("Elemwise", "ADD", 96, 8)
    assert (relu.kind, relu.mode, relu.bytes) == ("Elemwise", "FUSE_ADD_RELU", 80)
    assert relu.inputs == ("t", "b")  # through the bitcast
    # With the mask, and without the scratch memory.
    assert (ours.kind, ours.mode, ours.bytes) == ("FusedBatchNorm", "ADD_RELU", 113)
    assert convolution.kind == "ConvolutionForward"
    assert convolution.computation == 2 * (2 * 5 * 5 * 8) * (3 * 3 * 3)
    assert convolution.bytes == 2 * (150 + 216 + 400)
    times = {"t": (0.0, 1e-6), "y": (1e-6, 2e-6)}
    document = _emit.to_document([add, relu, ours, convolution], times, "cpu:0")
    # Our operator also reads t, so only the addition could be saved.
    assert summary(written(tmp_path, document)).pairs == ()
    found = summary(written(tmp_path, _emit.to_document([add, relu], times, "cpu:0")))
    assert (found.saving.bytes, found.saving.fused_bytes) == (176, 112)
    assert found.saving.seconds == pytest.approx(2e-6)


def test_joins_of_two_batch_norms_count(tmp_path: pathlib.Path) -> None:
    text = HLO.replace("jax_bnar_normalise_v1", "jax_bnar_dual_forward_v1")
    document = _emit.to_document(_hlo.operators(text), {}, "cpu:0")
    assert summary(written(tmp_path, document)).fused_joins == 1


@pytest.mark.slow
def test_our_resnet50() -> None:
    """It has 16 fused joins, 33 BatchNorm-ReLUs, and no pair of an addition and a ReLU."""
    pytest.importorskip("flax")
    from jax_bnar.profile._resnet50 import Settings, compiled

    program, _ = compiled(Settings(batch=1, size=32))
    operators = _hlo.operators(program.as_text() or "")
    kinds = [f"{o.kind} {o.mode or ''}".strip() for o in operators]
    assert kinds.count("FusedBatchNorm ADD_RELU") == 16
    assert kinds.count("FusedBatchNorm RELU") == 33
    assert kinds.count("ConvolutionForward") == 53
    assert "Elemwise FUSE_ADD_RELU" not in kinds


def test_emit(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same code reads what is written, and prints it beside MegEngine's profile."""
    pytest.importorskip("flax")
    path = tmp_path / "ours.json"
    small = ["--stage-sizes", "1", "1", "--batch", "2", "--size", "32", "--steps", "1"]
    assert command.main([str(DATA), "--emit", str(path), *small]) == 0
    shown = capsys.readouterr().out
    assert "[1] megengine_resnet50_profile.json" in shown
    assert "[2] ours.json" in shown
    assert "2 joins of BatchNorm, addition and ReLU are one pass already" in shown
    assert [each.name for each in tmp_path.iterdir()] == ["ours.json"]
    found = summary(path)
    assert found.pairs == ()
    assert found.roof_source == "copy"
    assert found.fused_joins == 2
    # The profiler of XLA:CPU names operators, so those that take any time have a time.
    assert found.seconds is not None
    totals = {total.kind: total for total in found.kinds}
    assert totals["FusedBatchNorm ADD_RELU"].seconds
    assert totals["ConvolutionForward"].seconds
    join = next(o for o in read(path).operators if o.kind == "FusedBatchNorm ADD_RELU")
    # A join in one pass reads two arrays and writes one, besides vectors.
    elements = math.prod(join.out_shapes[0])
    assert 12 * elements <= join.bytes <= 12.2 * elements + 4096


def test_emit_without_a_device(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flax")

    def devices() -> None:
        raise RuntimeError("Unable to initialize backend 'foo'")

    monkeypatch.setattr("jax.devices", devices)
    shown = failure(capsys, "--emit", str(tmp_path / "ours.json"))
    assert "JAX cannot start a device (Unable to initialize backend 'foo')" in shown


@pytest.mark.slow
def test_emit_over_a_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax")
    (tmp_path / "ours.json").mkdir()
    small = ["--stage-sizes", "1", "--batch", "1", "--size", "32", "--steps", "1"]
    shown = failure(capsys, "--emit", str(tmp_path / "ours.json"), *small)
    assert "the profile cannot be written (Is a directory)" in shown


@pytest.mark.slow
def test_emit_a_training_step(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("flax")
    path = tmp_path / "train.json"
    small = ["--stage-sizes", "1", "1", "--batch", "2", "--size", "32", "--steps", "1"]
    assert command.main(["--emit", str(path), "--train", "--json", *small]) == 0
    counts = {total.kind: total.count for total in summary(path).kinds}
    # A stem, two blocks with three convolutions each, and two shortcuts.
    assert counts["ConvolutionForward"] == 9
    assert counts["ConvolutionBackward"] == 9 + 8
    ours = {kind: n for kind, n in counts.items() if kind.startswith("FusedBatchNorm")}
    # Each shortcut's BatchNorm is in the call that joins it.
    assert sum(n for kind, n in ours.items() if "BACKWARD" not in kind) == 7
    assert sum(n for kind, n in ours.items() if "BACKWARD" in kind) == 7


class FakeEvent:
    def __init__(self, name: str, start: float, duration: float, **stats: Any) -> None:
        self.name, self.start_ns, self.duration_ns, self.stats = (
            name,
            start,
            duration,
            stats.items(),
        )


class FakeLine:
    def __init__(self, name: str, *events: FakeEvent) -> None:
        self.name, self.events, self.lines = name, events, [self]


class FakeData:
    def __init__(self, *planes: FakeLine) -> None:
        self.planes = planes


def test_times_of_a_device_win() -> None:
    """A device's plane has the kernels; the host's has only launches and, on a CPU, ends."""
    host = FakeLine(
        "/host:CPU",
        FakeEvent("conv", 1000, 10, hlo_op="conv"),
        FakeEvent("end: conv", 5000, 1),
        FakeEvent("other", 0, 10**6),
    )
    names = frozenset({"conv", "add"})
    assert _device_times._read(FakeData(host), names) == {"conv": (0.0, pytest.approx(4e-6))}
    device = FakeLine(
        "/device:GPU:0",
        FakeEvent("kernel_a", 2000, 500, hlo_op="conv"),
        FakeEvent("kernel_b", 2600, 400, hlo_op="conv"),
        FakeEvent("kernel_c", 3000, 100, hlo_op="add"),
    )
    assert _device_times._read(FakeData(host, device), names) == {
        "conv": (0.0, pytest.approx(1e-6)),
        "add": (pytest.approx(1e-6), pytest.approx(1.1e-6)),
    }
    assert _device_times._read(FakeData(FakeLine("/host:CPU")), names) == {}
