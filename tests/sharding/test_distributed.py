"""Several real processes (jax.distributed, gloo, loopback) train as a single one does."""

import os
import re
import subprocess
import sys

import pytest
from checkout import ROOT

pytestmark = pytest.mark.slow

for module in ("optax", "sklearn", "tyro"):
    pytest.importorskip(module, reason="the example needs what jax-bnar[demo] installs")

LAUNCH = ROOT / "examples" / "distributed" / "launch.py"


def test_two_and_four_processes_train_as_one() -> None:
    # Seven processes compile the same network, and optimising it would take most of the time.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    finished = subprocess.run(
        [sys.executable, LAUNCH, "--processes", "2", "4", "--steps", "6"],
        env=environment,
        timeout=500,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    runs = re.findall(r"(\d) processes, (\d) devices", finished.stdout)
    assert runs == [("1", "1"), ("2", "2"), ("4", "4")]
    # If statistics were those of a process's own images, losses would differ in the first digit.
    worst = re.findall(r"differ by at most (\S+)", finished.stdout)
    assert len(worst) == 2
    assert all(float(each) < 1e-5 for each in worst)
