"""Runs of examples/resnet50 that SIGTERM, a full disk or an exploding loss interrupts."""

import dataclasses
import errno
import os
import pathlib
import re
import signal
from typing import Any

import numpy as np
import pytest
import resnet50_example as example

# isort: split
from orbax import checkpoint as ocp
from resnet50 import metrics
from resnet50.data import pipeline
from resnet50.errors import UserError
from rich.console import Console

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an uninterrupted run of `example.DIGITS`."""
    return example.digits_losses(tmp_path_factory.mktemp("undisturbed"))


def test_sigterm_saves_and_the_run_goes_on(
    undisturbed: list[float], tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    write = metrics.Recorder.write

    def terminate_at_5(self: metrics.Recorder, step: int, *rest: Any) -> None:
        write(self, step, *rest)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    console = example.silent_console()
    options = example.tiny("digits", tmp_path, **example.DIGITS, profile_at=2, profile_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(metrics.Recorder, "write", terminate_at_5)
        assert example.train(options, console=console) == {}
    assert "stopped after step 5; --resume continues from there" in example.printed(console)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    unfinished = tmp_path / "checkpoints/9.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with pytest.raises(UserError, match="a run that reached step 5: continue it with --resume"):
        example.train(options)
    assert unfinished.is_dir()  # Another process may be writing it.
    resume = dataclasses.replace(options, run=dataclasses.replace(options.run, resume=True))
    console = Console(file=console.file, force_terminal=True, width=200)
    example.train(resume, console=console)
    assert example.losses(tmp_path) == undisturbed
    assert re.search(r"images/s  top-1 .* waiting for data", example.printed(console))

    # The profile was at a step before the first of the second run.
    assert "no profile is written: --profile-at 2 is before step 5" in example.printed(console)

    # Resuming once more only evaluates; another network is rejected.
    assert example.train(resume)["network"].images == 360
    model = dataclasses.replace(options.model, num_filters=8)
    with pytest.raises(UserError, match="another network: its num_filters is 4, and 8 was asked"):
        example.train(dataclasses.replace(resume, model=model))
    order = dataclasses.replace(options.training, seed=1)
    with pytest.raises(UserError, match="trained on other pictures, or in another order"):
        example.train(dataclasses.replace(resume, training=order))


def test_sigterm_does_not_wait_for_an_evaluation(
    undisturbed: list[float], tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    """It saves, and the evaluation is made up for; evaluations come after their checkpoints."""
    batches = pipeline.evaluation_batches
    started = []

    def terminated(*given: Any) -> Any:
        for index, batch in enumerate(batches(*given)):
            started.append(index)
            if index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    options = example.tiny("digits", tmp_path, **example.DIGITS, evaluate_every=0.4)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "evaluation_batches", terminated)
        console = example.silent_console()
        assert example.train(options, console=console) == {}
    assert started == [0, 1]  # of six
    assert "stopped after step 9; --resume continues" in example.printed(console)
    assert {line["kind"] for line in example.lines(tmp_path)} == {"train"}

    resume = dataclasses.replace(options, run=dataclasses.replace(options.run, resume=True))
    assert example.train(resume)["network"].images == 360
    assert example.losses(tmp_path) == undisturbed
    evaluated = [line["step"] for line in example.lines(tmp_path) if line["kind"] != "train"]
    assert evaluated == [9, 12]
    example.train(resume)
    assert len(example.lines(tmp_path)) == 14  # each result stands once


def test_a_full_disk_does_not_end_the_training(
    undisturbed: list[float], tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    save = ocp.CheckpointManager.save
    full = {4, 8, 12}

    def save_unless_full(self: Any, step: int, *args: Any, **kwargs: Any) -> bool:
        if step in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", save_unless_full)
    console = example.silent_console()
    options = example.tiny("digits", tmp_path, **example.DIGITS, checkpoint_every=2)
    with pytest.raises(UserError, match="checkpoint of step 12 could not be saved: no space left"):
        example.train(options, console=console)
    for step in (4, 8):
        sentence = f"step {step} could not be saved: no space left on the disk; the last good one"
        assert sentence in example.printed(console)
    assert example.losses(tmp_path) == undisturbed
    full.clear()
    resume = dataclasses.replace(options, run=dataclasses.replace(options.run, resume=True))
    example.train(resume, console=console)
    assert "resuming after step 10" in example.printed(console)
    assert example.losses(tmp_path) == undisturbed


def test_a_loss_that_explodes_keeps_the_good_checkpoints(tmp_path: pathlib.Path) -> None:
    options = example.tiny(
        "digits", tmp_path, **example.DIGITS, checkpoint_every=1, learning_rate=1e30, momentum=0.0
    )
    with pytest.raises(UserError, match="the loss is not finite at step"):
        example.train(options)
    for step in (tmp_path / "checkpoints").iterdir():
        for name, values in example.stored(tmp_path, int(step.name)).items():
            assert "params" not in name or np.isfinite(values).all()
