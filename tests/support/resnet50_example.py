"""Shared by the tests of examples/resnet50. Import it before any module of the example."""

import dataclasses
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkout import ROOT

for _module in (
    "PIL",
    "grain",
    "optax",
    "orbax.checkpoint",
    "rich",
    "safetensors",
    "sklearn",
    "tensorboardX",
):
    pytest.importorskip(_module, reason="the example needs what jax-bnar[resnet50] installs")
pytest.importorskip("tyro", reason="the example needs what jax-bnar[resnet50] installs")

EXAMPLE = ROOT / "examples" / "resnet50"
sys.path.append(str(EXAMPLE))

from orbax import checkpoint as ocp  # noqa: E402
from PIL import Image  # noqa: E402
from resnet50 import config, loop, metrics  # noqa: E402
from rich.console import Console  # noqa: E402
from sklearn.datasets import load_sample_images  # noqa: E402


@contextmanager
def as_users_run_jax() -> Iterator[None]:
    """Undoes the tests' strict settings: the program has none, and Flax does not support them."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        yield


def save_pictures(root: pathlib.Path, train: int, val: int) -> None:
    """Saves crops of scikit-learn's two photographs as root/<split>/{china, flower}/*.jpg."""
    generator = np.random.default_rng(0)
    photographs: Any = load_sample_images()
    for name, photograph in zip(("china", "flower"), photographs.images, strict=True):
        for split, count in (("train", train), ("val", val)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                top, left = generator.integers(300), generator.integers(500)
                part = photograph[top : top + 60, left : left + 80]
                Image.fromarray(part).save(folder / f"{index:03}.jpg", quality=90)


def tiny(source: str, output: pathlib.Path, **changes: Any) -> config.Config:
    """The source's preset with a network of one block, and `changes` by the name of the field."""
    _, preset = config.PRESETS[source]
    changes = {
        "image_size": 8 if source == "digits" else 32,
        "workers": 0,
        "stage_sizes": (1,),
        "num_filters": 4,
        "stem": "small",
        "batch_size": 16,
        "warmup_epochs": 0.0,
        "epochs": 1.0,
        "log_every": 1,
        "evaluate_every": 1000.0,
        "output": output,
        "images": None,
        **changes,
    }
    groups = {}
    for name in ("data", "model", "training", "run"):
        group = getattr(preset, name)
        fields = {f.name for f in dataclasses.fields(group)}
        groups[name] = dataclasses.replace(
            group, **{key: changes.pop(key) for key in fields & changes.keys()}
        )
    assert not changes
    return dataclasses.replace(preset, **groups)


def silent_console() -> Console:
    """A console whose text is in `.file.getvalue()`."""
    return Console(file=io.StringIO(), width=1000)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def environment(cache: pathlib.Path | None = None) -> dict[str, str]:
    """The environment for a program of the example; `cache` is for compiled programs."""
    variables = {k: v for k, v in os.environ.items() if k != "JAX_BNAR_IMPLEMENTATION"}
    variables["COLUMNS"] = "100"
    if cache is not None:
        variables["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return variables


def run(program: str, *arguments: Any, cache: pathlib.Path | None = None) -> tuple[int, str, str]:
    """Runs a program of the example; returns exit status, standard output and standard error."""
    finished = subprocess.run(
        [sys.executable, EXAMPLE / program, *map(str, arguments)],
        env=environment(cache),
        timeout=300,
        capture_output=True,
        text=True,
    )
    return finished.returncode, finished.stdout, finished.stderr


# Options of a small run, for tests that do not need a folder of pictures.
DIGITS = {"norm": "fused", "batch_size": 64, "epochs": 0.5}
TIMING = ("images_per_second", "data_wait")


def lines(output: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics, except those that depend on the clock."""
    found = metrics.read(output / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMING} for line in found]


def losses(output: pathlib.Path) -> list[float]:
    return [line["loss"] for line in lines(output) if line["kind"] == "train"]


def stored(output: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """All arrays in a checkpoint."""
    path = output / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    written: Any = checkpointer.metadata(path).item_metadata
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), written.tree)
    state = checkpointer.restore(path, restore_args=as_numpy)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def train(options: config.Config, on: int = 1, console: Console | None = None) -> dict[str, Any]:
    with as_users_run_jax():
        return loop.train(options, console or silent_console(), jax.devices()[:on])


def digits_losses(output: pathlib.Path) -> list[float]:
    train(tiny("digits", output, **DIGITS))
    return losses(output)


def variables(filters: int = 2, classes: int = 3, fill: float = 1.0) -> dict[str, Any]:
    """A few variables of a network, enough for what uses it, all filled with one value."""
    return {
        "params": {
            "conv_init": {"kernel": jnp.full((3, 3, 1, filters), fill, jnp.float32)},
            "bn_init": {
                "scale": jnp.full(filters, fill, jnp.float32),
                "bias": jnp.full(filters, fill, jnp.float32),
            },
            "Dense_0": {
                "kernel": jnp.full((filters, classes), fill, jnp.float32),
                "bias": jnp.full(classes, fill, jnp.float32),
            },
        },
        "batch_stats": {"bn_init": {"mean": jnp.full(filters, fill, jnp.float32)}},
    }
