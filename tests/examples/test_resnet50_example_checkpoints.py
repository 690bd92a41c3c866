"""The example's checkpoints: writing, reading back, damage, a full disk."""

import errno
import gc
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resnet50_example as example

# isort: split
from orbax import checkpoint as ocp
from resnet50 import checkpoints, config, optimizer, train_state
from resnet50.checkpoints import Checkpoints
from resnet50.display import Display
from resnet50.errors import UserError
from resnet50.train_state import TrainState


def state(fill: float = 1.0, filters: int = 2, step: int = 0) -> TrainState:
    sgd = optimizer.make(config.Training(), optax.constant_schedule(0.1))
    begun = train_state.begin(example.variables(filters, fill=fill), sgd, with_ema=True)
    return begun._replace(step=jnp.int32(step))


def targets(of: TrainState) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), of
    )


def about(**model: Any) -> dict[str, Any]:
    fields = {"stage_sizes": (1, 1), "num_filters": 2, "stem": "small", **model}
    described = config.Config(model=config.Model(**fields))
    dataset = {"classes": ["a", "b", "c"], "image_shape": [8, 8, 1]}
    return {"config": config.to_json(described), "dataset": dataset}


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> Iterator[Checkpoints]:
    """Checkpoints of steps 1 and 2, each filled with its number."""
    opened = Checkpoints(tmp_path, keep=3, about=about())
    for step in (1, 2):
        assert opened.save(step, state(step, step=step), {"next_batch": step}) is None
    yield opened
    opened.close()
    # Warnings about what a failed read leaves behind appear here, not in a later test.
    gc.collect()


# After a failed read, the garbage collector finds tasks of an event loop that orbax has closed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


def assert_state_of(step: int, restored: checkpoints.Restored | None) -> None:
    assert restored is not None
    assert (restored.step, restored.data) == (step, {"next_batch": step})
    expected = state(step, step=step)
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_checkpoints_come_back(saved: Checkpoints) -> None:
    assert_state_of(2, saved.restore(targets(state()), Display(example.silent_console())))
    part = saved.variables(1, {"ema": targets(state()).ema})
    np.testing.assert_array_equal(part["ema"]["params"]["bn_init"]["scale"], [1, 1])
    read = saved.about(2)
    assert read is not None
    assert config.model_from_json(read["config"]["model"]) == config.Model(
        stage_sizes=(1, 1), num_filters=2, stem="small"
    )


def test_old_checkpoints_are_deleted(saved: Checkpoints) -> None:
    for step in (3, 4):
        assert saved.save(step, state(step), {}) is None
    assert saved.steps() == [2, 3, 4]


@pytest.mark.parametrize("damage", ["cut", "missing description"])
def test_a_damaged_checkpoint_is_put_aside(
    saved: Checkpoints, tmp_path: pathlib.Path, damage: str
) -> None:
    last = tmp_path / "checkpoints" / "2"
    if damage == "missing description":
        (last / "about" / "metadata").unlink()
    for path in (last / "state").rglob("*"):
        if damage == "cut" and path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:20])
    console = example.silent_console()
    assert_state_of(1, saved.restore(targets(state()), Display(console)))
    assert "the checkpoint of step 2 cannot be read" in example.printed(console)
    assert (tmp_path / "damaged" / "2").is_dir()
    # The run continues and reaches that step again.
    assert saved.save(2, state(2.0, step=2), {"next_batch": 2}) is None
    assert_state_of(2, saved.restore(targets(state()), Display(example.silent_console())))


def test_only_damaged_checkpoints(saved: Checkpoints, tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "checkpoints").rglob("metadata"):
        path.unlink()
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        saved.restore(targets(state()), Display(example.silent_console()))


@pytest.mark.parametrize(("field", "value"), [("stage_sizes", (3, 4)), ("padding", "torch")])
def test_another_network_is_refused(
    saved: Checkpoints, tmp_path: pathlib.Path, field: str, value: Any
) -> None:
    other = Checkpoints(tmp_path, keep=3, about=about(**{field: value}))
    with pytest.raises(UserError, match=f"step 2 in .* is of another network: its {field} is"):
        other.restore(targets(state()), Display(example.silent_console()))
    other.close()
    assert saved.steps() == [1, 2]  # no checkpoint was moved aside


def test_a_full_disk_costs_one_checkpoint(saved: Checkpoints, monkeypatch: Any) -> None:
    real = ocp.CheckpointManager.save

    def full(*_: Any, **__: Any) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    problem = saved.save(3, state(3), {})
    assert problem == (
        "the checkpoint of step 3 could not be saved: no space left on the disk; the last good one"
        " is of step 2"
    )
    monkeypatch.setattr(ocp.CheckpointManager, "save", real)
    assert_state_of(2, saved.restore(targets(state()), Display(example.silent_console())))
    assert saved.save(3, state(3, step=3), {"next_batch": 3}) is None
    assert_state_of(3, saved.restore(targets(state()), Display(example.silent_console())))


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk: pathlib.Path) -> None:
    opened = Checkpoints(small_disk, keep=3, about=about())
    assert opened.save(1, state(1, step=1), {"next_batch": 1}) is None
    filler = small_disk / "filler"
    noise = np.random.default_rng(0).bytes(1 << 20)
    with filler.open("wb", buffering=0) as file:
        while written := os.statvfs(small_disk).f_bavail:
            file.write(noise[: written * 4096])
    problem = opened.save(2, state(2, step=2), {"next_batch": 2})
    assert problem is not None
    assert "step 2 could not be saved: no space left on the disk" in problem
    assert "the last good one is of step 1" in problem
    assert opened.steps() == [1]
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["1"]
    assert_state_of(1, opened.restore(targets(state()), Display(example.silent_console())))
    filler.unlink()
    assert opened.save(2, state(2, step=2), {"next_batch": 2}) is None
    assert_state_of(2, opened.restore(targets(state()), Display(example.silent_console())))
    opened.close()


def test_a_checkpoint_from_before_an_option_has_its_default(
    saved: Checkpoints, tmp_path: pathlib.Path
) -> None:
    old = about()
    del old["config"]["model"]["padding"]
    opened = Checkpoints(tmp_path, keep=3, about=old)
    assert opened.save(3, state(3, step=3), {"next_batch": 3}) is None
    opened.close()
    saved._manager.reload()
    assert_state_of(3, saved.restore(targets(state()), Display(example.silent_console())))
