"""What examples/resnet50 says of its options and runs, and both norms side by side."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import resnet50_example as example

# isort: split
import compare
from PIL import Image
from resnet50 import config
from resnet50.display import Display
from resnet50.errors import UserError

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.slow]


def agrees_early(run: dict[str, Any]) -> bool:
    early = compare.differences(run)[: compare.EARLY_STEPS]
    return len(early) > 0 and all(difference <= compare.LOSS_BOUND for difference in early)


def test_both_batch_norms_give_the_same_curve(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A small version of examples/resnet50/results/digits.json."""
    small = example.tiny("digits", tmp_path, num_filters=8, batch_size=64, learning_rate=1.0)
    monkeypatch.setitem(config.PRESETS, "digits", ("small", small))
    with example.as_users_run_jax():
        results = compare.compare((0,), 4.0, jax.devices()[:1])
    (run,) = results["runs"]
    assert len(run["fused"]["losses"]) == len(run["flax"]["losses"]) == 90
    assert run["fused"]["losses"] != run["flax"]["losses"]  # these are two networks
    assert agrees_early(run)
    assert min(run["fused"]["top1"], run["flax"]["top1"]) > 0.4
    assert abs(run["fused"]["top1"] - run["flax"]["top1"]) < 0.03


def test_the_stored_comparison_keeps_its_bounds() -> None:
    results = json.loads((example.EXAMPLE / "results" / "digits.json").read_text())
    assert len(results["runs"]) == 5
    tops = {norm: np.mean([run[norm]["top1"] for run in results["runs"]]) for norm in compare.NORMS}
    assert abs(tops["fused"] - tops["flax"]) <= compare.ACCURACY_BOUND
    for run in results["runs"]:
        assert agrees_early(run)
    assert results["passed"]


def test_a_finished_run_shows_what_it_came_to(tmp_path: pathlib.Path) -> None:
    console = example.silent_console()
    example.train(example.tiny("digits", tmp_path, **example.DIGITS), console=console)
    out = example.printed(console)
    for line in ("compiling; 12 steps follow", "step 1/12  compiled and done after"):
        assert line in out
    assert re.search(r"mean speed: [\d.]+ images/s", out)
    assert f"wrote {tmp_path / 'curve.png'}" in out
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.size[0] > 600
    for program in ("eval.py", "predict.py", "export.py"):
        assert re.search(rf"python \S*{program} {re.escape(str(tmp_path))}", out)


def test_noise_is_not_evaluated(tmp_path: pathlib.Path) -> None:
    console = example.silent_console()
    noise = {"synthetic_images": 64, "synthetic_classes": 3, "batch_size": 16}
    options = example.tiny("synthetic", tmp_path, **noise, dtype="float32")
    assert example.train(options, console=console) == {}
    assert {line["kind"] for line in example.lines(tmp_path)} == {"train"}
    assert "mean speed: " in example.printed(console)
    assert "eval.py" not in example.printed(console)


def test_batches_must_divide(tmp_path: pathlib.Path) -> None:
    options = example.tiny("digits", tmp_path, batch_size=60)
    with pytest.raises(UserError, match=r"--batch-size 60 does not divide .* on 8 devices"):
        example.train(options, on=8)
    for name in ("batch_size", "accumulate"):
        options = example.tiny("digits", tmp_path, **{name: -3})
        sentence = rf"--{name.replace('_', '-')} must be at least 1, got -3\."
        with pytest.raises(UserError, match=sentence):
            example.train(options)


@pytest.mark.parametrize(
    ("option", "value", "must"),
    [
        ("seed", -1, "be at least 0"),
        ("workers", -1, "be at least 0"),
        ("warmup_epochs", -1.0, "be at least 0"),
        ("epochs", float("nan"), "be positive"),
        ("epochs", float("inf"), "be positive"),
        ("learning_rate", -1.0, "be positive"),
        ("evaluate_every", float("nan"), "be positive"),
        ("bn_momentum", 5.0, "be from 0 to 1"),
        ("label_smoothing", 3.0, "be at least 0 and below 1"),
        ("ema_decay", -0.5, "be at least 0 and below 1"),
        ("log_every", 0, "be at least 1"),
        ("profile_at", -1, "be at least 0"),
        ("profile_at", 1000, "be before the last step"),
        ("synthetic_classes", 0, "be at least 1"),
    ],
)
def test_options_without_sense(
    tmp_path: pathlib.Path, option: str, value: float, must: str
) -> None:
    options = example.tiny("digits", tmp_path, **{option: value})
    with pytest.raises(UserError, match=rf"--{option.replace('_', '-')} must {must}, got"):
        example.train(options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--images", "pics"), "--images pics can only be used with pictures in a folder; the"),
        (("--num-processes", "2"), "--num-processes can only be used with --distributed."),
        (("--distributed", "--coordinator", "h"), "--coordinator must be HOST:PORT, got h."),
    ],
)
def test_options_that_would_be_ignored(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = example.run("train.py", "digits", "--output", tmp_path / "run", *arguments)
    assert code == 2
    assert err.startswith(f"error: {sentence}")


def test_a_path_that_orbax_takes_for_a_pattern(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"--output must not contain '\['"):
        example.train(example.tiny("digits", tmp_path / "run[1]"))


def test_names_that_look_like_markup() -> None:
    console = example.silent_console()
    Display(console).warn("the picture pics/[red]/:dog:/[/p] cannot be read")
    assert "pics/[red]/:dog:/[/p] cannot" in example.printed(console)


@pytest.mark.parametrize(
    ("program", "arguments", "sentence"),
    [
        ("eval.py", ("--json", "/nowhere/a.json"), "the folder of --json /nowhere/a.json does not"),
        ("predict.py", ("a.jpg", "--top", "-1"), "--top must be at least 1, got -1."),
    ],
)
def test_options_are_refused_before_anything_is_computed(
    tmp_path: pathlib.Path, program: str, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = example.run(program, str(tmp_path), *arguments)
    assert code == 2
    assert err.startswith(f"error: {sentence}")


def test_a_network_is_exported_for_platforms_that_exist(tmp_path: pathlib.Path) -> None:
    code, _, err = example.run("export.py", str(tmp_path), "n.jax", "--platforms", "cpu", "gpu")
    assert (code, err) == (2, "error: --platforms must be some of cpu, cuda, rocm, tpu, got gpu.\n")


def test_an_output_folder_that_cannot_be(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output .*file/run cannot be used \(Not a directory"):
        example.train(example.tiny("digits", tmp_path / "file" / "run"))


def test_a_gpu_that_is_not_there(tmp_path: pathlib.Path) -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this machine has a GPU")
    arguments = ("digits", "--platform=gpu", f"--output={tmp_path}")
    code, _, err = example.run("train.py", *arguments)
    assert code == 2
    assert err.startswith("error: JAX finds no gpu on this machine")
    assert "choose --platform cpu" in err
    assert "Traceback" not in err


def test_help_names_every_option(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        config.from_command_line(["folder", "--help"])
    printed = capsys.readouterr().out
    for group in (config.Data, config.Model, config.Training, config.Run):
        for field in dataclasses.fields(group):
            assert f"--{field.name.replace('_', '-')}" in printed
    assert "(required)" in printed  # --images
    assert "None" not in printed
    chosen = config.from_command_line(["digits", "--norm", "flax", "--stage-sizes", "2", "2"])
    assert (chosen.source, chosen.model.norm, chosen.model.stage_sizes) == (
        "digits",
        "flax",
        (2, 2),
    )
    assert chosen.training.batch_size == 64
