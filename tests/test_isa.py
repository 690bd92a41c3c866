"""Every instruction set that this processor runs gives what pure JAX gives."""

import pytest
from subprocesses import run_python

PRELUDE = """
import os
os.environ["JAX_BNAR_CPU_ISA"] = {isa!r}
import jax
"""

# Forward and backward; both layouts, and widths that do not fill a vector.
PROGRAM = """
import jax.numpy as jnp
import numpy as np
import jax_bnar
from jax_bnar import _native_targets

def results(implementation, dtype, shape, axis, save):
    random = np.random.default_rng(0)
    channels = (shape[axis],)
    operands = [
        jnp.asarray(random.standard_normal(s), d)
        for s, d in ((shape, dtype), (shape, dtype), (channels, "float32"), (channels, "float32"))
    ]
    def loss(*operands):
        result = jax_bnar.bn_add_relu(
            *operands, axis=axis, save=save, implementation=implementation)
        return jnp.square(result.y.astype("float32")).sum() + result.var.sum(), result
    gradients, result = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*operands)
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves((gradients, result))]

for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 5e-2), ("float16", 1e-2)):
    for shape, axis in (((5, 6, 7, 19), -1), ((8, 4, 4, 64), -1), ((3, 5, 9, 7), 1)):
        for save in ("y", "mask"):
            ours, theirs = (
                results(implementation, dtype, shape, axis, save)
                for implementation in ("ffi", "xla"))
            for a, b in zip(ours, theirs, strict=True):
                # Relative to the array: a sum's small elements cancel.
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
print(_native_targets.cpu_isa())
"""


@pytest.mark.parametrize("isa", ["avx512bf16", "avx512", "avx2", "baseline"])
def test_agrees_with_pure_jax(isa: str) -> None:
    used = run_python(PROGRAM, timeout=300, prelude=PRELUDE.format(isa=isa)).split()[-1]
    if used != isa:
        assert isa != "baseline"
        pytest.skip(f"this processor does not run {isa}")
