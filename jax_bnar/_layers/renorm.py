"""What the BatchRenorm layers of Linen and NNX share: their fields and limits.

The arithmetic is in `jax_bnar._operators.renorm`.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from jax_bnar._operators.validation import check_integer

# A number, or a function of the number of training steps so far, such as a schedule of Optax.
Limit = float | Callable[[Any], Any]

# As in the layers called BatchRenorm that CrossQ and Stable-Baselines Jax (sbx) use.
EPSILON: Final = 1e-3
WARM_UP_STEPS: Final = 100_000
R_MAX: Final = 3.0
D_MAX: Final = 5.0


class Correction(NamedTuple):
    """What a layer corrects batch statistics towards, and how far at most.

    Attributes:
        mean: the running mean, of any shape with C elements.
        var: the running variance, with the shape of mean.
        r_max: r lies in [1/r_max, r_max]; 1 leaves the deviation alone.
        d_max: d lies in [-d_max, d_max]; 0 leaves the mean alone.
    """

    mean: jax.Array
    var: jax.Array
    r_max: jax.Array
    d_max: jax.Array

    @classmethod
    def of(cls, layer: Any, mean: jax.Array, var: jax.Array, steps: jax.Array) -> "Correction":
        """That of a layer with these running statistics, after so many steps."""
        is_warm = jnp.asarray(steps) >= layer.warm_up_steps
        # 1 and 0 make it a BatchNorm.
        r_max, d_max = _value(layer.r_max, steps), _value(layer.d_max, steps)
        r_max = jnp.where(is_warm, r_max, jnp.ones_like(r_max))
        d_max = jnp.where(is_warm, d_max, jnp.zeros_like(d_max))
        return cls(mean, var, r_max, d_max)

    def of_channels(self) -> "Correction":
        """Itself, with one channel axis."""
        return self._replace(mean=self.mean.reshape(-1), var=self.var.reshape(-1))


def refuse_mask(mask: Any) -> None:
    if mask is not None:
        raise NotImplementedError(
            "BatchRenorm: mask is not supported, because the operator has statistics of all"
            " elements; leave the padding out of x, or use BatchNorm, which takes a mask."
        )


def check_fields(layer: Any) -> None:
    """Checks the fields that only BatchRenorm has.

    Raises:
        ValueError, TypeError: a field of the layer is invalid.
    """
    for name, least in (("r_max", 1), ("d_max", 0)):
        limit = getattr(layer, name)
        if callable(limit):
            continue
        try:
            is_valid = float(limit) >= least
        except (TypeError, ValueError):
            raise TypeError(
                f"BatchRenorm: {name} must be a number or a function of the number of steps, got"
                f" {limit!r} of type {type(limit).__name__}."
            ) from None
        if not is_valid:
            raise ValueError(f"BatchRenorm: {name} must be at least {least}, got {limit!r}.")
    steps = check_integer("BatchRenorm", "warm_up_steps", layer.warm_up_steps)
    if steps < 0:
        raise ValueError(f"BatchRenorm: warm_up_steps must be at least 0, got {steps}.")


def _value(limit: Limit, steps: jax.Array) -> jax.Array:
    # Schedules compute with the integer steps and with floats.
    with jax.numpy_dtype_promotion("standard"):
        value = limit(steps) if callable(limit) else limit
    # The operator rounds them to its own dtype, which may be float64.
    return jnp.asarray(value).astype(float)
