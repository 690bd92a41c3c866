"""examples/resnet50 on several devices and in several processes gives one device's losses."""

import dataclasses
import math
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import resnet50_example as example

# isort: split
from resnet50 import config, devices, loop
from sharding_tools import compiled_collectives

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return example.digits_losses(tmp_path_factory.mktemp("one"))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["fused", "flax"])
def test_eight_devices_train_as_one(
    on_one_device: list[float], tmp_path: pathlib.Path, norm: str
) -> None:
    """With either BatchNorm, the statistics are those of the batch on all devices."""
    console = example.silent_console()
    options = example.tiny("digits", tmp_path, **{**example.DIGITS, "norm": norm})
    example.train(options, on=8, console=console)
    assert "on 8 x cpu (cpu)" in example.printed(console)
    np.testing.assert_allclose(example.losses(tmp_path), on_one_device, rtol=1e-3)
    if norm == "fused":
        assert_only_sums_travel(options, tmp_path / "again")


def assert_only_sums_travel(options: config.Config, output: pathlib.Path) -> None:
    """In a step, devices exchange only gradients and sums per channel, never activations."""
    run = dataclasses.replace(options.run, output=output)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    with example.as_users_run_jax():
        trainer = loop.Trainer(
            dataclasses.replace(options, run=run), mesh, example.silent_console()
        )
        everywhere, split = devices.replicated(mesh), devices.split_batch(mesh)
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
            jax.eval_shape(trainer.programs.initial, jax.random.key(0)),
        )
        batch = {
            "image": jax.ShapeDtypeStruct((64, 8, 8, 1), np.uint8, sharding=split),
            "label": jax.ShapeDtypeStruct((64,), np.int32, sharding=split),
        }
        program = trainer.programs.step.lower(state, batch).compile()  # pyright: ignore
        trainer.close()
    operations = compiled_collectives(program)
    assert operations
    assert {array.opcode for operation in operations for array in operation} == {"all-reduce"}
    # The smallest activation that a device holds: 8 pictures of 8 x 8 pixels and 4 channels.
    sizes = [math.prod(array.shape) for operation in operations for array in operation]
    assert max(sizes) < 8 * 8 * 8 * 4


@pytest.mark.slow
def test_two_processes_train_as_one(
    on_one_device: list[float], tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    options = config.to_json(example.tiny("digits", tmp_path, **example.DIGITS))
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    flags = ["digits", "--distributed", f"--coordinator=localhost:{port}", "--num-processes=2"]
    flags += ["--platform=cpu", "--stage-sizes", "1", f"--output={tmp_path}"]
    for group in ("model", "training", "run"):
        for name in ("norm", "num_filters", "batch_size", "epochs", "warmup_epochs", "log_every"):
            if name in options[group]:
                flags.append(f"--{name.replace('_', '-')}={options[group][name]}")
    processes = [
        subprocess.Popen(
            [sys.executable, example.EXAMPLE / "train.py", *flags, f"--process-id={number}"],
            env=example.environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (0, 1)
    ]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert "on 2 x cpu (cpu) in 2 processes" in printed[0]
    assert "step 12/12" not in printed[1]
    np.testing.assert_allclose(example.losses(tmp_path), on_one_device, rtol=1e-3)
