"""An Equinox layer on the fused operators: `BatchNorm`, and `Shortcut` for the join of two norms.

Arguments, parameters and state are those of `equinox.nn.BatchNorm`, so files of weights are
interchangeable.
"""

try:
    import equinox as _equinox  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "equinox":
        raise
    raise ImportError(
        "jax_bnar.equinox_layers needs Equinox, which is not installed: pip install equinox"
    ) from error

from jax_bnar._base.public_names import show_public_names as _show_public_names
from jax_bnar._layers.equinox.batch_norm import BatchNorm, Shortcut

__all__ = ["BatchNorm", "Shortcut"]

_show_public_names(globals())
