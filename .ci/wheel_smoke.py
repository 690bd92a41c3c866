"""Runs forward and backward on the installed package, outside the checkout.

--without-compiler fails if a compiler is on PATH. --cuda expects jax-bnar-cuda13, and lowers to its
kernels, which needs no GPU.
"""

import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_bnar
from jax_bnar._kernels import cuda_driver, targets

checkout = pathlib.Path(__file__).resolve().parents[1]
package = pathlib.Path(jax_bnar.__file__).resolve()
assert "site-packages" in package.parts, f"{package} is not an installed package"
assert package.parent != checkout / "jax_bnar"
compilers = [name for name in ("cc", "gcc", "g++", "clang", "nvcc") if shutil.which(name)]
if "--without-compiler" in sys.argv:
    assert compilers == [], compilers


def loss(x: jax.Array, z: jax.Array, implementation: str) -> jax.Array:
    return jnp.square(jax_bnar.bn_add_relu(x, z, None, None, implementation=implementation).y).sum()


x, z = np.random.default_rng(0).standard_normal((2, 8, 7, 7, 24), np.float32)
for ours, theirs in zip(
    jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, z, "ffi"),
    jax.grad(loss, (0, 1))(x, z, "xla"),
    strict=True,
):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
print(f"{package}: the kernels agree with pure JAX")

trace = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2).trace(x, z, None)
text = trace.lower(lowering_platforms=("cuda",)).as_text()
calls = [name for name in ("forward", "backward") if f"@jax_bnar_{name}_v1" in text]
# A program for the GPU of another machine calls the kernels, whether this one has them or not.
if "--cuda" in sys.argv or not cuda_driver.devices():
    assert calls == ["forward", "backward"], targets.why_no_cuda()
if "--cuda" in sys.argv:
    module = targets.cuda.__name__
    assert module == "jax_bnar_cuda13._cuda", module
    print(f"{module}: CUDA {targets.cuda.cuda_version()}, {targets.cuda.cuda_architectures()}")
else:
    assert "jax-bnar-cuda13 is not installed" in targets.why_no_cuda()
