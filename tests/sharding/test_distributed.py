"""Several real processes on this machine train as one does: jax.distributed, gloo, loopback."""

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
    # Seven processes compile the same network: most of the time would go into making it fast.
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
    # Statistics of a process's own images would already differ in the first digit.
    worst = re.findall(r"differ by (\S+) at most", finished.stdout)
    assert len(worst) == 2
    assert max(map(float, worst)) < 1e-5
