"""`import jax_bnar` needs jax and numpy only, starts no backend, and reads its environment late."""

import jax
import numpy as np
import pytest
from subprocesses import run_python

import jax_bnar


def test_import_without_flax() -> None:
    run_python(
        """
        import sys
        for name in ("flax", "optax", "scipy", "sklearn", "matplotlib"):
            sys.modules[name] = None
        import jax_bnar
        import numpy as np
        jax_bnar.bn_add_relu(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), None, None)
        """,
        timeout=120,
        # JAX itself uses SciPy, and a None would block it: load it first.
        prelude="import jax, jax.numpy, scipy",
    )


def test_import_does_not_start_a_backend() -> None:
    """Else `jax.config.update("jax_num_cpu_devices", ...)` after the import would come too late."""
    output = run_python(
        """
        import jax, jax_bnar
        jax.config.update("jax_num_cpu_devices", 3)
        print(jax.device_count())
        """,
        timeout=120,
        prelude="",
    )
    assert output.split() == ["3"]


def test_public_names() -> None:
    for name in (
        "bn_add_relu",
        "bn_relu",
        "batch_norm",
        "bn_add_relu_inference",
        "bn_relu_inference",
        "batch_norm_inference",
        "dual_bn_add_relu",
        "BatchNormResult",
        "DualBatchNormResult",
        "DISABLED_EXPORT_CHECKS",
    ):
        assert hasattr(jax_bnar, name)


@pytest.mark.parametrize("value", ["ffi", "xla"])
def test_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("JAX_BNAR_IMPLEMENTATION", value)

    # A function of its own for each value: a cached trace would hide the environment.
    def function(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_relu(x, None, None).y

    jaxpr = str(jax.make_jaxpr(function)(np.ones((2, 3), np.float32)))
    assert ("implementation=ffi" in jaxpr) == (value == "ffi")
    assert ("bnar_forward" in jaxpr) == (value == "ffi")
