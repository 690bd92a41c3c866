"""`python -m jax_bnar.profile` on MegEngine's profile, on ours, and on broken files."""

import copy
import io
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profile_tools import DATA, failure, summary, written

from jax_bnar.profile import __main__ as command
from jax_bnar.profile._analysis import summarise
from jax_bnar.profile._file import ProfileError, read

pytest.importorskip("rich", reason="the command needs what jax-bnar[profile] installs")

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


@pytest.mark.slow
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


def test_a_byte_order_mark(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "marked.json"
    path.write_text(DATA.read_text(), encoding="utf-8-sig")
    assert command.main([str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["pairs"]) == 16


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
    assert "unexpected JSON structure" in shown("[" * 100_000)
    assert "unexpected JSON structure" in shown("1" * 5000)
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
    assert "give a profile to show, or --emit FILE to write one" in capsys.readouterr().err
    assert command.main([str(DATA), "--train", "--stage-sizes", "1"]) == 2
    assert (
        "without --emit FILE there is no use for --train, --stage-sizes" in capsys.readouterr().err
    )
    nowhere = tmp_path / "nowhere"
    assert "does not exist" in failure(capsys, "--emit", str(nowhere / "a.json"))
    for option, value, least in (
        ("--top", "0", "from 1 to"),
        ("--bandwidth", "nan", "above 0 and below 1e9"),
        ("--bandwidth", "fast", "above 0"),
        ("--batch", "x", "from 1 to"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.main([str(DATA), option, value])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert f"argument {option}: expected a number {least}" in error
        assert f", got {value}" in error
    for name, words in (("nowhere/a.svg", "does not exist"), ("a.jpeg2000", ".svg, .png, .pdf")):
        assert words in failure(capsys, str(DATA), "--picture", str(tmp_path / name))
    if _has_matplotlib():
        (tmp_path / "folder.svg").mkdir()
        assert command.main([str(DATA), "--picture", str(tmp_path / "folder.svg")]) == 1
        assert "the picture cannot be written (Is a dir" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough() -> None:
    """As in `python -m jax_bnar.profile --json FILE | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_bnar.profile", "--json", *[str(DATA)] * 40],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1
    process.stderr.close()


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
