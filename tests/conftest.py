"""JAX as every test expects it: strict promotion, float64, eight CPU devices."""

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Before any test touches a device: the number of devices is fixed when the backend starts.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests name the implementation they mean; the caller's environment must not choose for them.
os.environ.pop("JAX_BNAR_IMPLEMENTATION", None)

# Another native module in the place of the package's: tests/test_emulated_cuda.py runs tests of the
# operators on the CUDA kernels in this way.
if replacement := os.environ.get("JAX_BNAR_TEST_NATIVE_MODULE"):
    spec = importlib.util.spec_from_file_location("jax_bnar._native", replacement)
    assert spec is not None, replacement
    assert spec.loader is not None
    sys.modules["jax_bnar._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["jax_bnar._native"])

hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", deadline=None, print_blob=True, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def example_count(count: int) -> int:
    """So many random examples, times JAX_BNAR_TEST_EXAMPLES: CI looks further than `make test`."""
    return count * int(os.environ.get("JAX_BNAR_TEST_EXAMPLES", "1"))


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    """JAX keeps each program of a process, about 1 MB of machine code: 5 GB in the end."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A folder in which JAX keeps what it compiles: tests that run the same programs again."""
    folder = tmp_path_factory.mktemp("compiled")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0.0), strict=True):
        jax.config.update(name, value)
    yield folder
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
