"""examples/train_step.py learns and runs the kernels, and its evaluation changes nothing."""

import importlib.util
import os
import re
import subprocess
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkout import ROOT

from jax_bnar._kernels import targets

for module in ("optax", "sklearn"):
    pytest.importorskip(module, reason="the example needs optax and scikit-learn")

PROGRAM = ROOT / "examples" / "train_step.py"
NORMS = 1 + 2 * 3 + 2  # one in the stem, two per block, one on each shortcut that changes shape


@pytest.fixture(scope="module")
def example() -> ModuleType:
    # Loaded under a different name, because examples/resnet50 has a train_step.py too.
    spec = importlib.util.spec_from_file_location("train_step_example", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.slow
def test_it_learns() -> None:
    """Checks the held-out accuracy after two epochs; the default is ten."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_BNAR_IMPLEMENTATION"}
    finished = subprocess.run(
        [sys.executable, PROGRAM, "--epochs", "2"],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", finished.stdout)]
    accuracies = [float(text) for text in re.findall(r"accuracy ([\d.]+)%", finished.stdout)]
    assert len(losses) == len(accuracies) == 2
    assert losses[1] < losses[0] / 2
    assert accuracies[1] > 80


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # needed by optax
def test_a_step_runs_each_norm_as_one_call(example: ModuleType) -> None:
    images, labels = jnp.zeros((4, 8, 8, 1), jnp.float32), jnp.zeros(4, jnp.int32)
    variables = example.network.init(jax.random.key(0), images, train=False)
    optimizer_state = example.optimizer.init(variables["params"])
    state = example.State(variables["params"], variables["batch_stats"], optimizer_state)

    if ("forward", jax.default_backend()) in targets.kernels:
        text = example.train_step.lower(state, images, labels).as_text()
        assert len(re.findall(r"custom_call @jax_bnar_forward_", text)) == NORMS
        assert len(re.findall(r"custom_call @jax_bnar_backward_v", text)) == NORMS

    before = jax.tree.map(np.asarray, state.batch_stats)
    example.accuracy(state, images, labels)
    jax.tree.map(np.testing.assert_array_equal, before, state.batch_stats)
    images = jax.random.normal(jax.random.key(1), images.shape, jnp.float32)
    state, loss = example.train_step(state, images, labels)
    assert np.isfinite(loss)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.batch_stats), strict=True):
        assert np.any(old != new)
