"""`python -m jax_bnar.profile` on MegEngine's profile, on ours, and on broken files."""

import copy
import io
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jax_bnar.profile import __main__ as command
from jax_bnar.profile import _device_times, _emit, _hlo
from jax_bnar.profile._analysis import Summary, summarise
from jax_bnar.profile._file import ProfileError, read

pytest.importorskip("rich", reason="the command needs what jax-bnar[profile] installs")

# MegEngine's profile of ResNet-50 (float32, NCHW, batch 10), without the parts that are not read.
DATA = pathlib.Path(__file__).parents[1] / "data" / "megengine_resnet50_profile.json"
# relu(add(conv, shortcut) + bias), and a constant.
SMALL: dict[str, Any] = {
    "profiler": {
        "device": {
            "1": {"gpu0:0": {"start": 0.0, "kern": 0.0, "end": 1e-6}},
            "2": {"gpu0:0": {"start": 1e-6, "kern": 2e-6, "end": 4e-6}},
            "3": {"gpu0:0": {"start": 4e-6, "kern": 4e-6, "end": 5e-6}},
        },
        "opr_footprint": {
            "1": {"memory": 16, "computation": None, "in_shapes": [], "out_shapes": [[4]]},
            "2": {
                "memory": 96,
                "computation": 8,
                "in_shapes": [[2, 4], [2, 4]],
                "out_shapes": [[2, 4]],
                "param": {"mode": "ADD"},
            },
            "3": {
                "memory": 80,
                "computation": 8,
                "in_shapes": [[4], [2, 4]],
                "out_shapes": [[2, 4]],
                "param": {"mode": "FUSE_ADD_RELU"},
            },
        },
    },
    "graph_exec": {
        "comp_seq": ["1", "2", "3"],
        "operator": {
            "1": {"type": "ImmutableTensor", "name": "bias", "input": [], "output": ["b"]},
            "2": {"type": "Elemwise", "name": "ADD", "input": ["x", "z"], "output": ["t"]},
            "3": {"type": "Elemwise", "name": "F", "input": ["b", "t"], "output": ["y"]},
        },
    },
}


def summary(path: pathlib.Path, **keywords: Any) -> Summary:
    return summarise(read(path), top=10, **keywords)


def written(folder: pathlib.Path, document: Any) -> pathlib.Path:
    path = folder / "profile.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_numbers_of_megengine() -> None:
    found = summary(DATA)
    totals = {total.kind: total for total in found.kinds}
    counts = {kind: total.count for kind, total in totals.items()}
    assert counts["ConvolutionForward"] == 53
    assert counts["Elemwise FUSE_ADD_RELU"] == 49
    assert counts["Elemwise ADD"] == 17
    assert counts["PoolingForward"] == 2
    assert found.operators == sum(counts.values()) == 234
    saving = found.saving
    assert saving.count == 16
    assert saving.bytes == 1_103_932_416
    assert saving.fused_bytes == 662_383_616
    assert saving.seconds is not None
    assert round(saving.seconds * 1e6, 1) == 4686.9
    assert saving.fused_seconds == pytest.approx(2812e-6, rel=1e-3)
    assert saving.saved_share == pytest.approx(0.085, rel=1e-2)
    assert totals["ConvolutionForward"].bytes == 964_875_008
    assert totals["ConvolutionForward"].seconds == pytest.approx(15390.8e-6, rel=1e-5)
    assert totals["ConvolutionForward"].computation == pytest.approx(81.74e9, rel=1e-3)
    assert totals["Elemwise ADD"].bytes_per_s == pytest.approx(237.5e9, rel=1e-3)
    assert totals["Elemwise FUSE_ADD_RELU"].share == pytest.approx(0.150, rel=1e-2)
    # Constants move no data, so they have no bandwidth.
    assert totals["ImmutableTensor"].bytes_per_s is None
    assert found.roof_source == "operator"
    assert found.fused_joins == 0


def test_pairs_are_the_joins_of_the_blocks() -> None:
    pairs = [(p.first.identifier, p.second.identifier) for p in summary(DATA).pairs]
    assert len(pairs) == 16
    assert pairs[:3] == [("563", "565"), ("580", "582"), ("597", "599")]
    assert pairs[-1] == ("827", "829")


def test_prints_and_draws(tmp_path: pathlib.Path) -> None:
    """Runs the command in a separate process, as a user would."""
    pytest.importorskip("matplotlib", reason="a picture needs what jax-bnar[profile] installs")
    picture = tmp_path / "profile.svg"
    finished = subprocess.run(
        [sys.executable, "-m", "jax_bnar.profile", str(DATA), "--picture", str(picture)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    for text in (
        "16 pairs of Elemwise ADD and Elemwise FUSE_ADD_RELU: 4686.9 us, 1,103,932,416 bytes",
        "turns into 662,383,616 (60.0%)",
        "49 Elemwise FUSE_ADD_RELU, 17 Elemwise ADD",
    ):
        assert text in finished.stdout
    row = next(line for line in finished.stdout.splitlines() if "ConvolutionForward" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][:4] == [
        *("ConvolutionForward", "53", "15390.8", "69.8%")
    ]
    drawn = picture.read_text()
    assert "<svg" in drawn
    assert len(drawn) > 10_000


def test_small_profile(tmp_path: pathlib.Path) -> None:
    """Compares every number with one computed by hand."""
    found = summary(written(tmp_path, SMALL), bytes_per_s=1e8)
    assert found.seconds == pytest.approx(4e-6)
    assert found.span == pytest.approx(5e-6)
    (pair,) = found.pairs
    # x, z, bias and y have 8, 8, 4 and 8 elements of 4 bytes.
    assert (pair.bytes, pair.fused_bytes) == (176, 112)
    assert pair.seconds == pytest.approx(3e-6)
    add = next(total for total in found.kinds if total.kind == "Elemwise ADD")
    assert add.bytes_per_s == pytest.approx(96 / 2e-6)
    assert add.roof == pytest.approx(0.48)
    assert add.operations_per_s == pytest.approx(4e6)
    assert found.roof_source == "given"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["graph_exec"]["operator"]["3"].update(input=["b", "u"]),  # reads another array
        lambda d: d["graph_exec"]["operator"]["1"].update(input=["t"]),  # t has two readers
        lambda d: d["profiler"]["opr_footprint"]["2"].update(in_shapes=[[2, 4], [4]]),  # a bias
        lambda d: d["profiler"]["opr_footprint"]["3"].update(param={"mode": "ADD"}),  # no ReLU
    ],
)
def test_what_is_no_pair(change: Any, tmp_path: pathlib.Path) -> None:
    document = copy.deepcopy(SMALL)
    change(document)
    assert summary(written(tmp_path, document)).pairs == ()


def test_without_times(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = copy.deepcopy(SMALL)
    del document["profiler"]["device"]
    path = written(tmp_path, document)
    found = summary(path)
    assert found.seconds is found.span is found.saving.seconds is None
    assert found.saving.fused_bytes == 112
    arguments = [str(path)]
    if _has_matplotlib():
        arguments += ["--picture", str(tmp_path / "out.png")]
    assert command.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "no device times" in shown
    assert "1 pairs of Elemwise ADD and Elemwise FUSE_ADD_RELU: 176 bytes" in shown


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(DATA), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["saving"]["bytes"] == 1_103_932_416
    assert len(found["pairs"]) == 16


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a call that fails, and returns the one sentence that it prints."""
    assert command.main(list(arguments)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.endswith((".", ")", "'"))
    return line


def test_broken_files(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DATA.read_text()
    path = tmp_path / "broken.json"

    def shown(content: str | bytes) -> str:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return failure(capsys, str(path))

    assert "the file is empty" in shown("")
    assert "ends in the middle of its JSON, after 40,000 characters" in shown(text[:40_000])
    assert "is not JSON" in shown("profile")
    assert "is not text in UTF-8" in shown(b"\x89PNG\xff\xfe")
    assert "no profiler writes" in shown("[" * 100_000)
    assert "no profiler writes" in shown("1" * 5000)
    assert "the file must be an object, got [1, 2]" in shown("[1, 2]")
    assert "graph_exec must be an object, got nothing" in shown("{}")
    document = copy.deepcopy(SMALL)
    document["profiler"]["device"]["2"]["gpu0:0"]["end"] = -1
    assert 'profiler.device["2"]["gpu0:0"].end must be a number from 0' in shown(
        json.dumps(document)
    )
    document["profiler"]["device"]["2"]["gpu0:0"]["end"] = 1e-6
    assert "must be at least kern, 2e-06" in shown(json.dumps(document))
    document = copy.deepcopy(SMALL)
    document["graph_exec"]["comp_seq"].append("4")
    assert 'graph_exec.operator["4"] must be an object, got nothing' in shown(json.dumps(document))
    missing = tmp_path / "missing.json"
    assert "cannot be read (No such file or directory)" in failure(capsys, str(missing))
    assert "cannot be read (Is a directory)" in failure(capsys, str(tmp_path))


def test_refused_calls(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "name a file, or one to write with --emit" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere"
    assert "does not exist" in failure(capsys, "--emit", str(nowhere / "a.json"))
    for arguments in (["--top", "0"], ["--bandwidth", "nan"], ["--batch", "x"]):
        with pytest.raises(SystemExit) as stopped:
            command.main([str(DATA), *arguments])
        assert stopped.value.code == 2
    if _has_matplotlib():
        for name in ("nowhere/a.svg", "a.jpeg2000"):
            capsys.readouterr()
            assert command.main([str(DATA), "--picture", str(tmp_path / name)]) == 1
            assert "the picture cannot be written" in capsys.readouterr().err


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


PLACES = places(SMALL)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def shows_or_refuses(path: pathlib.Path) -> None:
    """Any file must either be shown or be rejected with a message."""
    from rich.console import Console

    from jax_bnar.profile._tables import show

    profile, sentence = None, ""
    try:
        profile = read(path)
    except ProfileError as error:
        sentence = str(error)
    if profile is not None:
        shown = io.StringIO()
        show([summarise(profile, top=3)], Console(file=shown, width=200))
        shown.getvalue().encode()
        return
    assert sentence.startswith(str(path))
    assert "\n" not in sentence
    assert len(sentence) < 400


@settings(max_examples=200)
@given(place=st.sampled_from(PLACES), value=anything)
@example(place=("profiler", "device", "2", "gpu0:0", "end"), value=10**400)
@example(place=("profiler", "opr_footprint", "2", "memory"), value=10**400)
@example(place=("profiler", "opr_footprint", "2", "in_shapes"), value=[[0, 4], [2, 4]])
@example(place=("graph_exec", "operator", "2", "name"), value="[bold]\n\ud800")
@example(place=("graph_exec", "operator", "2", "type"), value="\x1b[2J\ud800")
def test_any_value_anywhere(
    place: tuple[Any, ...], value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = copy.deepcopy(SMALL)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    shows_or_refuses(written(tmp_path_factory.mktemp("fuzz"), document))


@settings(max_examples=60)
@given(end=st.integers(0, len(DATA.read_text()) if DATA.exists() else 0), junk=st.binary())
def test_truncated_anywhere(
    end: int, junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "cut.json"
    path.write_bytes(DATA.read_bytes()[:end] + junk)
    shows_or_refuses(path)


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
  %pass = (f32[2,4]{1,0}, u8[1]{0}) custom-call(%y, %same, %b), TARGET, backend_config=CONFIG
  %out = f32[2,4]{1,0} get-tuple-element(%pass), index=0
  %conv = bf16[2,5,5,8]{3,2,1,0} fusion(%i, %k), kind=kCustom, calls=%convolved
  ROOT %both = (f32[2,4]{1,0}, bf16[2,5,5,8]{3,2,1,0}) tuple(%out, %conv)
}
"""
for word, text in (
    ("WINDOW", "window={size=3x3 pad=1_1x1_1}"),
    ("TARGET", 'custom_call_target="jax_bnar_normalise_v1"'),
    ("CONFIG", '{activation = "relu", has_z = true, save_mask = true}'),
):
    HLO = HLO.replace(word, text)


def test_operators_of_hlo(tmp_path: pathlib.Path) -> None:
    """The code that finds MegEngine's ADD and FUSE_ADD_RELU also finds those left by XLA."""
    add, relu, ours, convolution = _hlo.operators(HLO)
    assert (add.kind, add.mode, add.bytes, add.computation) == ("Elemwise", "ADD", 96, 8)
    assert (relu.kind, relu.mode, relu.bytes) == ("Elemwise", "FUSE_ADD_RELU", 80)
    assert relu.inputs == ("t", "b")  # through the bitcast
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


def test_emit_over_a_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax")
    (tmp_path / "ours.json").mkdir()
    small = ["--stage-sizes", "1", "--batch", "1", "--size", "32", "--steps", "1"]
    shown = failure(capsys, "--emit", str(tmp_path / "ours.json"), *small)
    assert "the profile cannot be written (Is a directory)" in shown


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
