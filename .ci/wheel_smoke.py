"""Runs the installed package forward and backward; .ci/run calls this outside the checkout."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jax_bnar

checkout = pathlib.Path(__file__).resolve().parents[1]
package = pathlib.Path(jax_bnar.__file__).resolve()
assert "site-packages" in package.parts, f"{package} is not an installed package"
assert package.parent != checkout / "jax_bnar"


def loss(x: jax.Array, z: jax.Array, implementation: str) -> jax.Array:
    return jnp.square(jax_bnar.bn_add_relu(x, z, None, None, implementation=implementation).y).sum()


x, z = np.random.default_rng(0).standard_normal((2, 8, 7, 7, 24), np.float32)
for ours, theirs in zip(
    jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, z, "ffi"),
    jax.grad(loss, (0, 1))(x, z, "xla"),
    strict=True,
):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
print(f"{package}: kernels agree with pure JAX")
