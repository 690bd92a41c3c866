"""Every use of JAX that is not public API lives here.

Checked on jax 0.10.2 and 0.12.0.1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

# Not documented, but exported by jax.interpreters and used so by the FFI tutorial of jax itself.
primitive_batchers = batching.primitive_batchers
fancy_primitive_batchers = batching.fancy_primitive_batchers
primitive_jvps = ad.primitive_jvps
primitive_transposes = ad.primitive_transposes
instantiate_zeros = ad.instantiate_zeros
is_undefined_primal = ad.is_undefined_primal
Zero = ad.Zero
apply_primitive = xla.apply_primitive
register_lowering = mlir.register_lowering
lower_fun = mlir.lower_fun
partial_eval_jaxpr_custom_rules = partial_eval.partial_eval_jaxpr_custom_rules


def register_dce_rule(primitive: Any, rule: Callable[[Sequence[bool], Any], Any]) -> None:
    """`rule` takes which results are used, and the equation; it returns (used inputs, equation)."""

    def adapted(used: Sequence[bool], *rest: Any) -> Any:
        # Later than 0.10.2 there is a list of live inputs between the two.
        return rule(used, rest[-1])

    partial_eval.dce_rules[primitive] = adapted


def same_manual_axes(*arrays: Any) -> tuple[Any, ...]:
    """The arrays (or None), cast to vary over the manual mesh axes over which any of them varies.

    What `jax.numpy` does under `shard_map`. The cast transposes to the psum that the gradient of a
    replicated scale needs, so the rules of the operators see local gradients only.
    """
    axes = frozenset[Any]().union(
        *(jax.typeof(a).manual_axis_type.varying for a in arrays if a is not None)
    )

    def cast(array: Any) -> Any:
        if array is None:
            return None
        missing = tuple(sorted(axes - jax.typeof(array).manual_axis_type.varying))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(map(cast, arrays))


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
