"""The tests that Haiku and Keras install with themselves pass where `jit(f)` is `jit(fuse(f))`.

Flax and Equinox do not install theirs; programs of the same kinds are in `test_fuse_rebuilds.py`.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

SUPPORT = pathlib.Path(__file__).parents[1] / "support"

# Modules of tests, and how many of their functions are fused at least. Haiku's own tests of
# BatchNorm do not jit anything, so they would show nothing here.
SUITES = {
    "haiku._src.stateful_test": 20,
    "keras.src.layers.normalization.batch_normalization_test": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("module", SUITES)
def test_foreign_suite(module: str, tmp_path: pathlib.Path) -> None:
    package, *rest = module.split(".")
    # It is not imported here: Keras would choose its backend, and keep it in this process.
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    root = pathlib.Path(found.origin or "").parent
    file = root.joinpath(*rest).with_suffix(".py")
    if not file.exists():
        pytest.skip(f"{package} is installed without {file.name}")
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nmarkers =\n    requires_trainable_backend: of Keras\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "-p", "fuse_everything"]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(file)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "the analysis failed" not in done.stdout
    (fused,) = re.findall(r"(\d+) functions fused", done.stdout)
    assert int(fused) >= SUITES[module]
