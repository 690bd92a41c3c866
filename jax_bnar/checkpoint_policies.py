"""Policies of `jax.checkpoint` for networks with the operators of this package."""

from typing import Any

import jax

from jax_bnar._autodiff.remat import MASK_NAME, STATISTICS_NAME
from jax_bnar._base.public_names import show_public_names as _show_public_names

__all__ = ["dots_and_statistics_saveable"]

_NAMED = jax.checkpoint_policies.save_only_these_names(STATISTICS_NAME, MASK_NAME)


def dots_and_statistics_saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keeps for backward what is expensive to compute; backward recomputes the rest.

    `jax.checkpoint` (`jax.remat`), `flax.linen.remat` and `flax.nnx.remat` take it as `policy`. The
    operators of this package may be in the program as such, in layers, or brought in by
    `jax_bnar.fuse`, inside or outside of the checkpoint. These results are kept:

    - those of convolutions and matrix products, as by `jax.checkpoint_policies.dots_saveable`;
    - the mean and var of every normalisation, so that y is recomputed in one pass over x;
    - with `save="mask"`, the masks.

    So backward recomputes every y, which is about half of what forward would keep otherwise, and
    padding and pooling. A y that is the residual of a later one is recomputed with it, back to the
    last shortcut that has a convolution. Chen and others describe the idea ("Training deep nets
    with sublinear memory cost", 2016, section 4).

    Args:
        primitive: the operation whose results JAX asks about.
        *avals: its operands.
        **params: its parameters.

    Returns:
        Whether the results are kept.

    Example:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> kernel = jnp.eye(8, dtype=jnp.float32)
        >>> def loss(x):
        ...     return (jax_bnar.bn_relu(x @ kernel, None, None).y @ kernel).sum()
        >>> policy = jax_bnar.checkpoint_policies.dots_and_statistics_saveable
        >>> gradient = jax.grad(jax.checkpoint(loss, policy=policy))
        >>> gradient(jnp.ones((4, 8), jnp.float32)).shape
        (4, 8)
    """
    return bool(
        jax.checkpoint_policies.dots_saveable(primitive, *avals, **params)
        or _NAMED(primitive, *avals, **params)
    )


_show_public_names(globals())
