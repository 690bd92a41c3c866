"""Every use of JAX that is not public API lives here.

Checked on jax 0.10.2.
"""

from typing import Any

import jax
import jax.core
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

# Not documented, but exported by jax.interpreters and used so by the FFI tutorial of jax itself.
primitive_batchers = batching.primitive_batchers
primitive_jvps = ad.primitive_jvps
instantiate_zeros = ad.instantiate_zeros
Zero = ad.Zero
apply_primitive = xla.apply_primitive
register_lowering = mlir.register_lowering
lower_fun = mlir.lower_fun


def out_aval(like: Any, shape: tuple[int, ...], dtype: Any) -> jax.core.ShapedArray:
    """Abstract result that varies over the manual mesh axes over which `like` varies.

    Without them `shard_map` accepts a wrong `out_specs=P()` and returns one device's result.
    """
    varying = like.manual_axis_type.varying
    if not varying:
        return jax.core.ShapedArray(shape, dtype)
    return jax.core.ShapedArray(
        shape,
        dtype,
        sharding=NamedSharding(like.sharding.mesh, PartitionSpec()),
        manual_axis_type=ManualAxisType(varying=varying),
    )
