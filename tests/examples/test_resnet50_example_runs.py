"""Runs examples/resnet50 on a folder of pictures as a user would: killed, resumed, exported."""

import dataclasses
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resnet50_example as example
import subprocesses
import tyro

# isort: split
import eval as eval_program
import export
import predict
from resnet50 import config, loop, runs
from resnet50.errors import UserError

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.slow]

STEPS = 24
# This recipe has a folder of pictures, micro-batches, a moving average, and bfloat16.
RECIPE = {
    "image-size": 32,
    "num-filters": 4,
    "batch-size": 8,
    "accumulate": 2,
    "ema-decay": 0.9,
    "learning-rate": 1.5,
    "epochs": 4,
    "warmup-epochs": 1,
    "evaluate-every": 100,
    "log-every": 1,
    "checkpoint-every": 3,
    "stem": "small",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("pictures")
    example.save_pictures(root, train=24, val=9)
    return root


def command(pictures: pathlib.Path, output: pathlib.Path, *more: Any) -> list[str]:
    options = [f"--{name}={value}" for name, value in RECIPE.items()]
    given = ["folder", f"--images={pictures}", *options, "--stage-sizes", "1"]
    return [*given, f"--output={output}", *map(str, more)]


@pytest.fixture(scope="module")
def finished(
    pictures: pathlib.Path, cache: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The output folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("finished")
    arguments = command(pictures, output, "--workers=1")
    code, out, err = example.run("train.py", *arguments, cache=cache)
    assert code == 0, out + err
    assert f"pictures in {pictures}: 48 pictures to train on, 18 held out, 2 classes" in out
    assert "step 24: average top-1" in out
    return output


def children(process: int) -> list[int]:
    """The children of a process, whichever thread started them, if the system reports them."""
    found = pathlib.Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def is_alive(process: int) -> bool:
    status = pathlib.Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_killed_and_resumed_is_bit_identical(
    pictures: pathlib.Path, finished: pathlib.Path, cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    last = random.SystemRandom().randrange(4, STEPS - 4)
    process = subprocess.Popen(
        [sys.executable, example.EXAMPLE / "train.py", *command(pictures, tmp_path, "--workers=2")],
        env=example.environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    metrics_file = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics_file.exists() or metrics_file.read_bytes().count(b"\n") < last:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "checkpoints" / str(STEPS)).exists()
    # The processes that decode pictures exit too.
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)

    arguments = command(pictures, tmp_path, "--workers=0", "--resume")
    code, out, err = example.run("train.py", *arguments, cache=cache)
    assert code == 0, out + err
    assert "resuming after step" in out, f"killed after step {last}"
    actual, expected = example.stored(tmp_path, STEPS), example.stored(finished, STEPS)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].tobytes() == expected[name].tobytes(), (name, f"killed after {last}")
    assert example.lines(tmp_path) == example.lines(finished), f"killed after step {last}"
    assert [line["step"] for line in example.lines(finished) if line["kind"] == "train"] == list(
        range(1, STEPS + 1)
    )


def test_networks_learn_the_two_photographs(finished: pathlib.Path) -> None:
    evaluated = {line["kind"]: line for line in example.lines(finished) if line["kind"] != "train"}
    assert set(evaluated) == {"val_network", "val_average"}
    for line in evaluated.values():
        assert line["images"] == 18
        assert line["top1"] > 0.6
        assert line["top5"] == 1
        assert line["loss"] < math.log(2)


def evaluate(run: pathlib.Path, output: pathlib.Path, **options: Any) -> dict[str, Any]:
    arguments = eval_program.Arguments(run=run, json=output, workers=0, **options)
    with example.as_users_run_jax():
        eval_program.main(arguments)
    return json.loads(output.read_text())


def test_evaluation_repeats_that_of_the_training(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """From the checkpoint, with another batch size, either BatchNorm, and folded."""
    trained = {line["kind"]: line for line in example.lines(finished)}
    for norm, fold in (("fused", True), ("flax", False)):
        result = evaluate(finished, tmp_path / "r.json", norm=norm, fold=fold, batch_size=16)
        assert result["top1"] == pytest.approx(trained["val_average"]["top1"], abs=1 / 18)
        assert result["loss"] == pytest.approx(trained["val_average"]["loss"], rel=0.02)
        assert (result["images"], result["step"]) == (18, STEPS)
        assert (result["norm"], result["folded"]) == (norm, fold)
    result = evaluate(finished, tmp_path / "r.json", average=False, batch_size=8, step=STEPS)
    assert result["loss"] == pytest.approx(trained["val_network"]["loss"], rel=0.02)


def test_pictures_that_cannot_be_evaluated(
    finished: pathlib.Path, pictures: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    example.save_pictures(tmp_path, train=1, val=1)
    for split in ("train", "val"):
        (tmp_path / split / "china").rename(tmp_path / split / "rose")
    with pytest.raises(UserError, match="2 classes that are not the 2 of the network"):
        evaluate(finished, tmp_path / "r.json", images=tmp_path, batch_size=8)
    for picture in (pictures / "val").rglob("*.jpg"):
        broken = tmp_path / "broken" / picture.relative_to(pictures)
        broken.parent.mkdir(parents=True, exist_ok=True)
        broken.write_bytes(b"no picture")
    shutil.copytree(pictures / "train", tmp_path / "broken" / "train")
    with pytest.raises(UserError, match="none of the held-out pictures is readable"):
        evaluate(finished, tmp_path / "r.json", images=tmp_path / "broken", batch_size=8)
    with pytest.raises(UserError, match=r"has no step 5; it has \["):
        evaluate(finished, tmp_path / "r.json", step=5)
    with pytest.raises(UserError, match="is not an output folder of train"):
        evaluate(pictures, tmp_path / "r.json")
    with pytest.raises(UserError, match=r"--json .* is a folder; name a file in it"):
        evaluate(finished, tmp_path)
    with pytest.raises(UserError, match="--workers must be at least 0, got -1"):
        eval_program.main(eval_program.Arguments(run=finished, workers=-1))


def test_prediction(
    finished: pathlib.Path,
    pictures: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def percents(printed: str) -> list[float]:
        return [float(number) for number in re.findall(r"([\d.]+)%", printed)]

    paths = {name: pictures / "train" / name / "000.jpg" for name in ("china", "flower")}
    alone = {}
    for name, picture in paths.items():
        with example.as_users_run_jax():
            predict.main(predict.Arguments(finished, (picture,), fold=name == "flower"))
        alone[name] = capsys.readouterr().out
        assert "china" in alone[name]
        assert "flower" in alone[name]
        assert alone[name].count("%") == 2
    # Three pictures in batches of two are those two, and the first again.
    monkeypatch.setattr(predict, "_BATCH", 2)
    with example.as_users_run_jax():
        predict.main(predict.Arguments(finished, (*paths.values(), paths["china"])))
    china, flower, again = np.reshape(percents(capsys.readouterr().out), (3, 2))
    np.testing.assert_array_equal(china, again)
    np.testing.assert_allclose(china, percents(alone["china"]), atol=0.5)
    np.testing.assert_allclose(flower, percents(alone["flower"]), atol=1)
    junk = tmp_path / "junk.jpg"
    junk.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"junk.jpg cannot be read \(UnidentifiedImageError"):
        predict.main(predict.Arguments(finished, (paths["china"], junk)))
    with pytest.raises(UserError, match="no picture was named"):
        predict.main(predict.Arguments(finished, ()))


def test_the_command_line_takes_several_pictures() -> None:
    arguments = tyro.cli(predict.Arguments, args=["runs/one", "a.jpg", "b.jpg", "--top", "2"])
    pictures = (pathlib.Path("a.jpg"), pathlib.Path("b.jpg"))
    assert arguments == predict.Arguments(pathlib.Path("runs/one"), pictures, top=2)


@pytest.mark.parametrize(("norm", "dtype"), [("fused", "bfloat16"), ("flax", "float32")])
def test_folded_equals_unfolded(finished: pathlib.Path, norm: config.Norm, dtype: str) -> None:
    """Compares both with the unfolded network in float32, from one checkpoint."""
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    with example.as_users_run_jax():
        trained = runs.load(finished, norm=norm)
        trained = dataclasses.replace(trained, net=trained.net.clone(dtype=dtype))
        exactly = dataclasses.replace(trained, net=trained.net.clone(dtype="float32"))
        folded = trained.folded()
        assert "batch_stats" not in folded.variables
        exact, unfolded, actual = (
            np.asarray(of.logits_function()(of.variables, jnp.asarray(images)))
            for of in (exactly, trained, folded)
        )
    scale = abs(exact).max()
    bound = {"float32": 1e-5, "bfloat16": 2**-6}[dtype]
    assert abs(unfolded - exact).max() <= bound * scale
    assert abs(actual - exact).max() <= bound * scale
    assert (actual != unfolded).any()  # these are two networks, not the same one twice


@pytest.mark.parametrize(("norm", "fold"), [("fused", True), ("fused", False), ("flax", True)])
def test_exported_file_stands_alone(
    finished: pathlib.Path, tmp_path: pathlib.Path, norm: config.Norm, fold: bool, capsys: Any
) -> None:
    path = tmp_path / "network.jax"
    with example.as_users_run_jax():
        arguments = export.Arguments(finished, path, norm=norm)
        assert arguments.fold
        export.main(dataclasses.replace(arguments, fold=fold))
    out = capsys.readouterr().out
    printed = re.search(r"differ by at most (\S+) \(the largest is (\S+)\)", out)
    assert printed
    # The lines that it prints load the file in a process that knows nothing.
    _, _, to_run = out.partition("To run it:\n")
    assert ("import jax_bnar" in to_run) == (norm == "fused")
    shape = subprocesses.run_python(f"{to_run}print(logits.shape)", timeout=120, prelude="")
    assert shape == "(1, 2)\n"
    difference, largest = map(float, printed.groups())
    assert 0 < difference < 2**-5 * largest if fold else difference == 0
    about = json.loads((tmp_path / "network.jax.json").read_text())
    assert about == {"classes": ["china", "flower"], "image_shape": [32, 32, 3], "step": STEPS}
    program = jax.export.deserialize(bytearray(path.read_bytes()))
    assert ("@jax_bnar" in program.mlir_module()) == (norm == "fused")
    for batch in (1, 5):
        logits = program.call(np.zeros((batch, 32, 32, 3), np.uint8))
        assert (logits.shape, logits.dtype) == ((batch, 2), np.float32)


def test_first_variables_from_a_run(
    finished: pathlib.Path, pictures: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    console = example.silent_console()
    # The same options as for the finished run, so that its compiled programs are reused.
    given = command(pictures, tmp_path, "--workers=0", f"--init-from={finished}")
    options = config.from_command_line(given)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    with example.as_users_run_jax():
        trainer = loop.Trainer(options, mesh, console)
        state, step = trainer.first_state()
        trainer.close()
    assert step == 0
    assert f"starting from {finished}" in example.printed(console)
    averages = {n: v for n, v in example.stored(finished, STEPS).items() if n.startswith("['ema']")}
    begun = jax.tree_util.tree_leaves_with_path({"ema": state.variables})
    assert len(averages) == len(begun)
    for path, leaf in begun:
        np.testing.assert_array_equal(leaf, averages[jax.tree_util.keystr(path)])
    for left, right in zip(*map(jax.tree.leaves, (state.ema, state.variables)), strict=True):
        np.testing.assert_array_equal(left, right)


def test_sigterm_to_the_whole_job(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """To the workers too, while these start and cannot ignore it yet."""
    process = subprocess.Popen(
        [sys.executable, example.EXAMPLE / "train.py", *command(pictures, tmp_path, "--workers=2")],
        env=example.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    while not children(process.pid):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Others than workers start too; a second later these are there, and still busy with imports.
    time.sleep(1)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "--resume continues from there" in out
    assert "Traceback" not in out
    assert "leaked" not in out
