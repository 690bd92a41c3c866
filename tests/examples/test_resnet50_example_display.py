"""What a training prints: in a log a line now and then, in a narrow terminal what matters."""

import io
import pathlib

import pytest
import resnet50_example as example

# isort: split
from resnet50 import accuracy, config, summary
from resnet50.display import HEARTBEAT_SECONDS, Display
from rich.console import Console

VALUES = {
    "epoch": 1.25,
    "loss": 2.30119,
    "images_per_second": 912.0,
    "top1": 0.12,
    "learning_rate": 0.1,
    "data_wait": 0.01,
}
RESULT = accuracy.Result(top1=0.5, top5=1.0, loss=0.7, images=18)


def test_a_log_shows_a_living_run() -> None:
    now = 0.0
    console = example.silent_console()
    display = Display(console, clock=lambda: now)
    with display.training(0, 1000):
        now = 60.0
        display.first_step(1, 1000)
        for step in range(2, 200):
            now += 1.0
            display.step(step, 1000)
        display.metrics(200, 1000, VALUES)
        now += HEARTBEAT_SECONDS - 1
        display.step(201, 1000)  # a line has just been there
        advance = display.evaluating(500)
        for _ in range(100):
            now += 1.0
            advance()
        display.evaluation(201, "network", RESULT, classes=2)
    lines = example.printed(console).splitlines()
    assert lines[:4] == [
        "compiling; 1000 steps follow",
        "step 1/1000  compiled and done after 60 s",
        "step 31/1000",
        "step 61/1000",
    ]
    assert "step 201/1000" not in lines
    assert [line for line in lines if line.startswith("evaluating")] == [
        f"evaluating, batch {batch} of 500" for batch in (1, 31, 61, 91)
    ]
    assert lines[-1] == "step 201: network top-1 50.00%, loss 0.7000 on 18 held-out pictures"


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_shows_step_and_remaining_time(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    display = Display(console)
    with display.training(0, 450_000):
        display.metrics(123_456, 450_000, VALUES)
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("\r")[2].splitlines()[0]
    assert len(last) <= width + len("\x1b[2K")
    assert "123456/450000" in last
    assert ":" in last  # the remaining time
    assert "epoch 1.25  loss 2.3012" in last


def test_top_5_of_two_classes_is_left_out() -> None:
    assert "top-5" not in RESULT.text(classes=5)
    assert "top-5 100.00%" in RESULT.text(classes=6)


def test_mean_speed_is_that_of_all_pictures() -> None:
    lines = [
        {"step": 10, "kind": "train", "images_per_second": 100.0},
        {"step": 10, "kind": "val_network"},
        {"step": 40, "kind": "train", "images_per_second": 50.0},
    ]
    assert summary.mean_speed(lines) == pytest.approx(40 / (10 / 100 + 30 / 50))
    assert summary.mean_speed([]) is None


def test_a_picture_that_cannot_be_written_does_not_end_in_a_traceback(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "curve.png").mkdir()
    found = summary.report(config.PRESETS["digits"][1], tmp_path / "metrics.jsonl")
    assert "curve.png cannot be written (Is a directory)" in found[0]
