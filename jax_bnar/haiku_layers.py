"""A Haiku layer on the fused operators: `BatchNorm`, and `Shortcut` for the join of two norms.

Arguments, parameters and states are those of `haiku.BatchNorm`, so checkpoints are interchangeable.
"""

try:
    import haiku as _haiku  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "haiku":
        raise
    raise ImportError(
        "jax_bnar.haiku_layers needs Haiku, which is not installed: pip install dm-haiku"
    ) from error

from jax_bnar._base.public_names import show_public_names as _show_public_names
from jax_bnar._layers.haiku.batch_norm import BatchNorm, Shortcut

__all__ = ["BatchNorm", "Shortcut"]

_show_public_names(globals())
