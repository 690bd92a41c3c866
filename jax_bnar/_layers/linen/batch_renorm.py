"""The Linen layer; import it from `jax_bnar.flax_layers`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_bnar._layers.checks import checked_residual
from jax_bnar._layers.linen.batch_norm import BatchNorm, prepared
from jax_bnar._layers.prepared import PreparedCall
from jax_bnar._layers.renorm import (
    D_MAX,
    EPSILON,
    R_MAX,
    WARM_UP_STEPS,
    Correction,
    Limit,
    check_fields,
    refuse_mask,
)
from jax_bnar._layers.statistics import BatchStatistics


class BatchRenorm(BatchNorm):
    """Batch renormalization (S. Ioffe, arXiv 1702.03275) on the fused operators.

        y = act(((x - mean)/std * r + d) * scale + bias + residual)
        r = clip(std/running_std, 1/r_max, r_max)
        d = clip((mean - running_mean)/running_std, -d_max, d_max)

    with std = sqrt(var + epsilon), and running_std likewise. For the gradient, r and d are
    constants. Training so computes with nearly the running statistics that evaluation uses, which
    helps with small or changing batches. For the first `warm_up_steps` steps it is `BatchNorm`.
    Forward reads x once for the statistics and once for y; backward is that of `BatchNorm`.

    It is a `BatchNorm` in everything else, but for the `mask` of a call, which is refused: fields,
    modes, dtypes, evaluation, folding. Its variables are those of `BatchNorm` and
    `batch_stats/steps`, the number of updates so far. The names and defaults are those of the
    `BatchRenorm` of CrossQ and Stable-Baselines Jax, whose checkpoints `apply` takes as they are;
    it has r_max and d_max as variables, which are fields here. There is one difference to it: it
    normalises with var/r^2 + epsilon, and here epsilon is added as in the paper,
    (var + epsilon)/r^2.

    Attributes:
        epsilon: added to the variances; static, > 0.
        warm_up_steps: the number of steps without a correction.
        r_max: the largest r, >= 1, or a function of `steps`, such as
            `optax.linear_schedule(1, 3, 35_000, 5_000)`. Steps count from the first one, those of
            the warm-up included.
        d_max: the largest magnitude of d, >= 0, or a function of `steps`.
        num_groups: as in `BatchNorm`; each ghost batch has its own r and d.
        update_batch_stats: whether training updates the running statistics and `steps`.
    """

    epsilon: float = EPSILON
    warm_up_steps: int = WARM_UP_STEPS
    r_max: Limit = R_MAX
    d_max: Limit = D_MAX

    @nn.compact
    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: Any = None,
        residual: Any = None,
    ) -> jax.Array:
        """Normalises x.

        Args:
            x: any shape that has the feature axes.
            use_running_average: like the field; exactly one of the two must be given.
            mask: not supported: must be None.
            residual: as in `BatchNorm`.

        Returns:
            y, with the shape of x.

        Raises:
            flax.errors.ModifyScopeVariableError, ValueError, TypeError: as in `BatchNorm`.
            NotImplementedError: as in `BatchNorm`, or a mask is given.
        """
        x = jnp.asarray(x)
        refuse_mask(mask)
        residual = checked_residual(residual, x)
        call = prepared(self, x, use_running_average, None if residual is None else residual.dtype)
        return self._corrected(call).run(residual)

    def _corrected(self, call: PreparedCall) -> PreparedCall:
        """The call of a BatchNorm, with the correction if it has batch statistics."""
        check_fields(self)
        is_initializing = self.is_initializing()
        if call.given is not None and not is_initializing:
            return call  # The variables may then be those of a BatchNorm.
        steps = self.variable("batch_stats", "steps", jnp.zeros, (), jnp.int32)
        if is_initializing:
            return call

        def update(statistics: BatchStatistics) -> None:
            call.update(statistics)
            if self.update_batch_stats:
                steps.value = steps.value + 1

        mean, var = (self.get_variable("batch_stats", name) for name in ("mean", "var"))
        correction = Correction.of(self, mean, var, steps.value)
        return dataclasses.replace(call, correction=correction, update=update)
