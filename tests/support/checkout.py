"""The path of the checkout that these tests belong to; the package may be installed elsewhere."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
TESTS = ROOT / "tests"
# Where its sources are.
FOLDERS = (
    "jax_bnar",
    "cpu",
    "cuda",
    "native",
    "python_module",
    "tests",
    "benchmarks",
    "examples",
    "cmake",
)
