"""JAX as every test expects it: strict promotion, float64, eight CPU devices."""

import importlib.util
import os
import sys

import hypothesis
import jax

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
