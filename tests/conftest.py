"""Sets up JAX as every test expects it: strict promotion, float64, eight CPU devices."""

import ctypes
import gc
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Code shared by the tests is in support/. The checkout is on the path because tests import its
# benchmarks, but it comes last: an installed jax_bnar must win over the sources, which may lack the
# native module.
_TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(_TESTS / "support"))
sys.path.append(str(_TESTS.parent))

import ir_context  # noqa: E402
import tiers  # noqa: E402

# The number of devices is fixed once the backend starts, so set it before any test uses a device.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests name the implementation they mean; the caller's environment must not override it.
os.environ.pop("JAX_BNAR_IMPLEMENTATION", None)

# Another native module may replace the package's. This is how tests/kernels/test_emulated_cuda.py
# runs the operators' tests on the CUDA kernels.
if replacement := os.environ.get("JAX_BNAR_TEST_NATIVE_MODULE"):
    spec = importlib.util.spec_from_file_location("jax_bnar._native", replacement)
    assert spec is not None, replacement
    assert spec.loader is not None
    sys.modules["jax_bnar._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["jax_bnar._native"])
    for cuda in ("jax_bnar._cuda", "jax_bnar_cuda13"):
        sys.modules[cuda] = None  # type: ignore[assignment]

hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", deadline=None, print_blob=True, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


class _Memory:
    """Limits the memory of a test process.

    JAX keeps every compiled program until the process ends, at about 1.4 MB each; for all tests
    that would be 5 GB.
    """

    allowance = 2**30  # bytes by which the process may grow before the caches are cleared

    def __init__(self) -> None:
        self._begin_another_context = ir_context.share_one()
        self._after_clearing = self._resident()

    def _resident(self) -> int:
        try:
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def clear_if_large(self) -> None:
        if self._resident() - self._after_clearing <= self.allowance:
            return
        jax.clear_caches()
        self._begin_another_context()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        # Without this the allocator keeps the freed memory.
        allocator = ctypes.CDLL(None)
        if hasattr(allocator, "malloc_trim"):
            allocator.malloc_trim(0)
        self._after_clearing = self._resident()


_memory = _Memory()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests into tiers before `-m` selects from them, and the longest to the front."""
    tiers.leave_combinations_to_slow(items)
    tiers.long_files_first(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Makes garbage collection rare, because tracing creates many objects and no garbage.

    With Python's own settings, the collector takes about 5 % of the time of the tests.
    """
    gc.collect()
    gc.freeze()  # What has been imported and collected stays until the end.
    gc.set_threshold(50_000, 20, 10)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _memory.clear_if_large()


@pytest.fixture(scope="module")
def few_objects_to_collect() -> None:
    """For tests of what collects garbage before it measures.

    That takes a second in a process that holds the programs of other tests.
    """
    gc.freeze()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """JAX's compilation cache in a new folder, for tests that run the same programs repeatedly."""
    folder = tmp_path_factory.mktemp("compiled")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0.0), strict=True):
        jax.config.update(name, value)
    yield folder
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
