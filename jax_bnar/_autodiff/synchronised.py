"""The training form with statistics over named axes: `shard_map`, `pmap`, `vmap(axis_name=...)`.

Each pass runs the two halves of the kernels with one all-reduce in between
(`_sharding.collectives`). The derivatives are those of `_sharding.halves.backward`. With n the
number of elements of a group on all devices, and S[.] the sum over the devices:

    dx = a*e - S[a*sum(e)]/n - rstd*(x-mean)*S[a*sum(e*xhat)]/n + dmean/n + 2*dvar*(x-mean)/n

The factor a = scale*rstd may differ between devices. dscale and dbias are each device's
contribution; JAX sums them, as it does for any operand that devices share.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import linear_call
from jax_bnar._autodiff.named_call import named_call
from jax_bnar._autodiff.remat import MASK_NAME, STATISTICS_NAME
from jax_bnar._autodiff.tangents import mapped_tangents, training_tangents
from jax_bnar._autodiff.training import transposed
from jax_bnar._base.config import Config
from jax_bnar._sharding import halves
from jax_bnar._sharding.collectives import NamedSpan, merge_statistics, parts_of

_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
_Results = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    config: Config,
    names: _Names,
    groups: _Groups,
    save: bool,
) -> tuple[_Results, jax.Array | None, jax.Array | int]:
    parts = parts_of(names, groups)
    mean, var = primitive.statistics(x, **config.common_statics)
    mean, var = merge_statistics(mean, var, NamedSpan(names, groups, parts))
    # They are named before their first use, so that a policy that saves them ends the
    # recomputation here.
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
    scale: jax.Array | None,
    bias: jax.Array | None,
    config: Config,
    names: _Names,
    groups: _Groups,
) -> _Results:
    """Returns (y, mean, var) with statistics, of shape (num_groups, C), over the axes `names`.

    All operands must vary over the same mesh axes (`jax_bnar._sharding.alignment`).
    """
    y, mean, var = named_call(_Synchronised(config, names, groups), (x, z, scale, bias))
    return y, mean, var


@dataclasses.dataclass(frozen=True)
class _Synchronised:
    """The function from (x, z, scale, bias) to (y, mean, var)."""

    config: Config
    names: _Names
    groups: _Groups

    def value(self, operands: Any) -> _Results:
        x, z, scale, bias = operands
        where = self.config, self.names, self.groups
        results, _, _ = _forward(x, z, scale, bias, *where, save=False)
        return results

    def derivative(self, operands: Any, tangents: Any) -> tuple[_Results, _Results]:
        """Like the rule of the training form, see `jax_bnar._autodiff.training`."""
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
        # `parts` is saved, because psum(1, names) in backward would be a NameError under
        # grad(vmap(axis_name)).
        residuals = (x, saved, mean, var, scale, bias, parts)
        linear_map = SynchronisedTangent(config, self.names, self.groups, _LOCAL)
        y_dot, mean_dot, var_dot = linear_call(linear_map, residuals, tangents, results)
        return results, (y_dot, mean_dot, var_dot)

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        x, *_ = operands
        of_statistics = x and not self.sees(axis_name)
        return any(jax.tree.leaves(operands)), of_statistics, of_statistics


@dataclasses.dataclass(frozen=True)
class SynchronisedTangent:
    """The linear map from the tangents of the operands to those of y and the statistics.

    Its residuals are those of the form on one device, followed by the number of parts.

    Attributes:
        config: the static parameters of the operator.
        names: the axes that the statistics are taken over.
        groups: `axis_index_groups` of these axes, or None.
        local: the same map on one device, whose functions this one calls with a span.
    """

    config: Config
    names: _Names
    groups: _Groups
    local: "LocalFunctions"

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        *local, _ = residuals
        y, *statistics = self.local.mapped_tangents(tuple(local), tangents)
        # Statistics over that axis are the same for all its examples.
        return y, *(each and not self.sees(axis_name) for each in statistics)

    def tangent(self, residuals: Any, tangents: Any) -> tuple[jax.Array, ...]:
        *local, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        return self.local.training_tangents(tuple(local), tangents, self.config, span)

    def transpose(self, residuals: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        *local, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        return self.local.transposed(tuple(local), cotangents, self.config, span=span)


class LocalFunctions(NamedTuple):
    """The derivative of an operator with one or with two normalised inputs.

    Attributes:
        mapped_tangents: see `jax_bnar._autodiff.tangents.mapped_tangents`.
        training_tangents: see `jax_bnar._autodiff.tangents.training_tangents`.
        transposed: the cotangents of the operands, from (residuals, cotangents, config, span=).
    """

    mapped_tangents: Callable[..., tuple[bool, ...]]
    training_tangents: Callable[..., tuple[jax.Array, ...]]
    transposed: Callable[..., tuple[jax.Array | None, ...]]


_HALVES = halves.Halves(primitive.backward_reduce, primitive.backward_apply)
_LOCAL = LocalFunctions(
    mapped_tangents,
    training_tangents,
    functools.partial(transposed, halves.backward, halves=_HALVES),
)
