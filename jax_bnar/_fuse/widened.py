"""Arrays of which a program has wider copies, as in mixed precision; kernels read these arrays."""

from typing import Any

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fuse.dtypes import holds, is_real
from jax_bnar._fuse.nodes import Value


def before_widening(value: Value, dtype: Any) -> Value | None:
    """The array of this dtype of which a value is a wider copy, or None if it is none."""
    node = value.producer
    if node is None or node.name != "convert_element_type":
        return None
    given = node.inputs[0]
    return given if isinstance(given, Value) and given.dtype == dtype else None


def stored_array(x: Value) -> Value:
    """The array of 16 bits that a program widens and then splits into groups; x if it does not.

    If only axes of length 1 or a merger of axes lie between, the search begins at that array.
    """
    value = x
    while (node := value.producer) is not None and node.name in ("reshape", "convert_element_type"):
        given = node.inputs[0]
        if not isinstance(given, Value) or not is_real(given.dtype):
            break
        if not holds(value.dtype, given.dtype):
            break
        value = given
    has_16_bits = accumulation_dtype(value.dtype) == x.dtype != value.dtype
    return value if has_16_bits else x
