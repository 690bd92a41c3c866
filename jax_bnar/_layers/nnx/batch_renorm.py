"""The NNX layer; import it from `jax_bnar.nnx_layers`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.activation import ActivationLike
from jax_bnar._layers.nnx.batch_norm import BatchNorm
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

    It is a `BatchNorm` in everything else, but for the `mask` of a call, which is refused by a
    NotImplementedError, and has one `nnx.BatchStat` more, `steps`: the number of updates so far.

    Args:
        num_features: number of channels.
        epsilon: added to the variances; static, > 0.
        warm_up_steps: the number of steps without a correction.
        r_max: the largest r, >= 1, or a function of `steps`, such as
            `optax.linear_schedule(1, 3, 35_000, 5_000)`. Steps count from the first one, those of
            the warm-up included.
        d_max: the largest magnitude of d, >= 0, or a function of `steps`.
        activation: as in `BatchNorm`.
        unbiased_running_var: as in `BatchNorm`.
        num_groups: as in `BatchNorm`; each ghost batch has its own r and d.
        save: as in `BatchNorm`.
        implementation: as in `BatchNorm`.
        update_batch_stats: whether training updates the running statistics and `steps`.
        rngs: as in `nnx.BatchNorm`.
        **fields: the other arguments of `nnx.BatchNorm`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = EPSILON,
        warm_up_steps: int = WARM_UP_STEPS,
        r_max: Limit = R_MAX,
        d_max: Limit = D_MAX,
        activation: ActivationLike = "none",
        unbiased_running_var: bool = False,
        num_groups: int = 1,
        save: Save = "y",
        implementation: Implementation = None,
        update_batch_stats: bool = True,
        rngs: nnx.Rngs,
        **fields: Any,
    ) -> None:
        super().__init__(
            num_features,
            epsilon=epsilon,
            activation=activation,
            unbiased_running_var=unbiased_running_var,
            num_groups=num_groups,
            save=save,
            implementation=implementation,
            update_batch_stats=update_batch_stats,
            rngs=rngs,
            **fields,
        )
        self.warm_up_steps = warm_up_steps
        self.r_max = r_max
        self.d_max = d_max
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def _run(self, *args: Any, mask: Any = None, **keywords: Any) -> jax.Array:
        refuse_mask(mask)
        return super()._run(*args, **keywords)

    def _prepared(self, *args: Any, **keywords: Any) -> PreparedCall:
        """The call of a BatchNorm, with the correction if it has batch statistics."""
        call = super()._prepared(*args, **keywords)
        check_fields(self)
        if call.given is not None:
            return call
        correction = Correction.of(self, self.mean[...], self.var[...], self.steps[...])
        return dataclasses.replace(call, correction=correction)

    def _update(self, statistics: BatchStatistics) -> None:
        super()._update(statistics)
        if self.update_batch_stats:
            self.steps[...] = self.steps[...] + 1
