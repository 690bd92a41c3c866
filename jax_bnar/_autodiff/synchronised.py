"""Training form with statistics over named axes: `shard_map`, `pmap`, `vmap(axis_name=...)`.

The halves of the kernels with one all-reduce between them, forward and backward
(`_sharding.collectives`). Derivatives are those of one device (`_sharding.halves.backward`) with

    n = elements of a group on all devices,    S[.] = sum over the devices

    dx = a*e - S[a*sum(e)]/n - rstd*(x-mean)*S[a*sum(e*xhat)]/n + dmean/n + 2*dvar*(x-mean)/n

where a = scale*rstd may be another one on each device. dscale and dbias are the device's own part:
what adds them up is JAX, as for any operand that devices share.
"""

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import linear_call
from jax_bnar._autodiff.named_call import named_call
from jax_bnar._autodiff.remat import MASK_NAME, STATISTICS_NAME
from jax_bnar._autodiff.tangents import mapped_tangents, training_tangents
from jax_bnar._autodiff.training import transposed
from jax_bnar._base.arrays import OptionalArray
from jax_bnar._base.config import Config
from jax_bnar._sharding import halves
from jax_bnar._sharding.collectives import NamedSpan, merge_statistics, parts_of

_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
_Results = tuple[jax.Array, jax.Array, jax.Array]

_HALVES = halves.Halves(primitive.normalise, primitive.backward_reduce, primitive.backward_apply)


def _forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: OptionalArray,
    bias: OptionalArray,
    config: Config,
    names: _Names,
    groups: _Groups,
    save: bool,
) -> tuple[_Results, jax.Array | None, jax.Array | int]:
    parts = parts_of(names, groups)
    mean, var = primitive.statistics(x, **config.common_statics)
    mean, var = merge_statistics(mean, var, NamedSpan(names, groups, parts))
    # Named before use, so that a policy which saves them cuts the recomputation here.
    mean = checkpoint_name(mean, STATISTICS_NAME)
    var = checkpoint_name(var, STATISTICS_NAME)
    y, *mask = primitive.normalise(
        x,
        z,
        scale,
        bias,
        mean,
        var,
        **config.forward_statics(save_mask=save and config.save_mask),
    )
    return (y, mean, var), mask[0] if mask else None, parts


def synchronised(
    x: jax.Array,
    z: jax.Array | None,
    scale: OptionalArray,
    bias: OptionalArray,
    config: Config,
    names: _Names,
    groups: _Groups,
) -> _Results:
    """(y, mean, var) of x; mean and var, of shape (num_groups, C), over the axes `names`.

    Operands vary over the same mesh axes (`jax_bnar._sharding.alignment`).
    """
    y, mean, var = named_call(_Synchronised(config, names, groups), (x, z, scale, bias))
    return y, mean, var


@dataclasses.dataclass(frozen=True)
class _Synchronised:
    """(y, mean, var) of (x, z, scale, bias)."""

    config: Config
    names: _Names
    groups: _Groups

    def value(self, operands: Any) -> _Results:
        x, z, scale, bias = operands
        where = self.config, self.names, self.groups
        results, _, _ = _forward(x, z, scale, bias, *where, save=False)
        return results

    def derivative(self, operands: Any, tangents: Any) -> tuple[_Results, _Results]:
        """As the rule of the training form: see `jax_bnar._autodiff.training`."""
        x, z, scale, bias = operands
        config, where = self.config, (self.config, self.names, self.groups)
        results, mask, parts = _forward(x, z, scale, bias, *where, save=True)
        y, mean, var = results
        saved = None
        if config.gate == "y":
            saved = y
        elif config.gate == "mask":
            assert mask is not None
            saved = checkpoint_name(mask, MASK_NAME)
        # The count is saved: psum(1, names) in backward is a NameError under grad(vmap(axis_name)).
        residuals = (x, saved, mean, var, scale, bias, parts)
        linear_map = _SynchronisedTangent(config, self.names, self.groups)
        y_dot, mean_dot, var_dot = linear_call(linear_map, residuals, tangents, results)
        return results, (y_dot, mean_dot, var_dot)

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        x, *_ = operands
        of_statistics = x and not self.sees(axis_name)
        return any(jax.tree.leaves(operands)), of_statistics, of_statistics


@dataclasses.dataclass(frozen=True)
class _SynchronisedTangent:
    """Tangents of (x, z, scale, bias) to those of (y, mean, var)."""

    config: Config
    names: _Names
    groups: _Groups

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        *local, _ = residuals
        y, mean, var = mapped_tangents(tuple(local), tangents)
        # The statistics over that axis are one value for all its examples.
        return (y, False, False) if axis_name in self.names else (y, mean, var)

    def tangent(self, residuals: Any, tangents: tuple[jax.Array | None, ...]) -> _Results:
        *local, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        return training_tangents(tuple(local), tangents, self.config, span)

    def transpose(self, residuals: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        *local, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        options = {"span": span, "halves": _HALVES}
        return transposed(halves.backward, tuple(local), cotangents, self.config, **options)
